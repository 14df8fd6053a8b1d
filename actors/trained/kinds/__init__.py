"""Kinds of trained drafters.

* `recognition`: which kind a folder has, by its configuration.
* `eagle3`: a layer on hidden states of several of the target's; P-EAGLE, too.
* `mtp`: the layers that a target's own files bring.
* `medusa`: heads on the target's last hidden state, one for each position.
* `dflash`: a block of tokens in one pass. `block_heads` is what DFlash 2 and DSpark add.
* `gemma4_assistant`: layers that attend to keys and values of the target.

A new kind takes a module that loads and attaches it, an entry in `actors.trained.drafter_model`, and a way to tell it
apart in `recognition`.
"""
