"""Benchmarks: contenders decode the same prompts with the same models, timed alike.

`one_stream` and `many_streams` each have a plan, the loop that measures, and the figures. `contenders` and
`many_stream_contenders` know how mlx-lm and this runtime decode; `timing` times their tokens. `setup` loads the models;
`tables` and `plot` show the figures.

A new contender is a value of `Contender` (or `StreamsContender`) that `ContenderRunner.run` can decode with, and an
entry in `Plan.contenders` (or `StreamsPlan.contenders`).
"""
