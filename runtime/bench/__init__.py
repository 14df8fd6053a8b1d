"""Benchmarks: contenders decode the same prompts with the same models, in turn.

`contenders` are ways to decode, by mlx-lm and by this runtime. `loaded_models` loads the models onto threads, and runs
contenders on them. `benchmark` has what the benchmarks share: `one_stream`, `many_streams` and `overhead`. `shapes` and
`small_models` make models with random weights.
"""
