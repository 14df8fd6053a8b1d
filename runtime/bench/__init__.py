"""Benchmarks: contenders that decode the same prompts with the same models, on the kernel `runtime.measuring`.

`contenders` knows how mlx-lm and this runtime decode. `benchmark` has what the benchmarks share; `one_stream`,
`many_streams` and `overhead` have each a plan, contenders, figures and a report. `plot` draws them.

A new contender is a value of `Contender` that `ContenderRunner.run` can decode with, in the contenders of a plan. A new
figure is a `Figure` in the list of a benchmark, with a counter in `Run` if it needs one.
"""
