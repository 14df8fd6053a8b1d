"""Models in GGUF files, the format of llama.cpp: which file, what is in it, and the mlx-lm model and tokenizer of that.

`names` finds the file in a folder or a hub repository, `container` reads metadata and tensors, `blocks` turns quantised
blocks into MLX's, `architectures` has the families with their configurations, `weights` makes the model, and
`vocabulary` the tokenizer, which splits text as `pre_tokenizers` says.
"""
