"""Benchmarks: contenders decode the same prompts with the same models, in turn.

`loaded_models` loads the models onto threads, `contenders` decodes with them, by mlx-lm and by this runtime, and
`benchmark` has what the benchmarks share: `one_stream`, `many_streams` and `overhead`. `shapes` and `small_models` make
models with random weights.
"""
