"""Benchmarks: contenders decode the same prompts with the same models. Built on `runtime.measuring`.

`contenders` knows how mlx-lm and this runtime decode. `benchmark` has what the benchmarks share; `one_stream`,
`many_streams` and `overhead` each have a plan, contenders, figures and a report.

To add a contender, add a `Contender` that `ContenderRunner.run` can run to a plan's contenders. To add a figure, add a
`Figure` to a benchmark's list, with a counter in `Run` if it needs one.
"""
