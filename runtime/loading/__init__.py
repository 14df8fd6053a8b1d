"""Models by what a user calls them: checking and loading sources, finding drafters, the demo pair, BLAS.

A source is a path, a hub id or a pair (model, tokenizer). `model_sources.py` checks it and loads it on its worker's
thread. `drafters.py` finds what drafts for a target. `blas.py` replaces MLX's BLAS on Linux; it must run before mlx is
imported. `vocabularies.py` compares tokenizers. `device.py` chooses MLX's default device, and `mlx_environment.py` sets
MLX's variables.
"""
