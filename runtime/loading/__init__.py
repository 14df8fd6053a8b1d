"""Models by what a user calls them: a path, a hub id or a pair (model, tokenizer).

`model_sources` checks it and loads it on its worker's thread, `drafters` finds what drafts for a target, and `blas`
replaces MLX's BLAS on Linux, before mlx is imported.
"""
