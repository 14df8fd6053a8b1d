"""Kinds of trained drafters.

* `attach`: recognises what a folder has, and attaches it to its target.
* `medusa`: heads on the target's last hidden state, one for each position. `head_sequence` is a text of them.
* `mtp`: the layer that a target's own files bring.
* `dflash`: a block of tokens in one pass. `block_sequence` is a text of it.
* `torch_file`: reads the files of `torch.save`.
* `target_parts`: a target's embedding, final norm and head, which drafters share.

A new kind goes here: a module that loads it, and an entry in `attach`. EAGLE-3 is in `actors.trained.eagle3`.
"""
