"""What a draft model buys on a machine that a few numbers describe: the real scheduling in simulated time.

`scenario` has the numbers, `scripted_models` the pair of models that behaves by them, and `simulation` runs the real
runtime over that pair. `comparison` compares the ways of decoding one text. `streams` runs several texts at once, and
`streams_comparison` compares the ways of that. `tables` and `plot` show the comparisons.

A new property of machines or models is a field of `Scenario`, and an option in `runtime/cli/simulate_command.py`. A new
way of decoding to compare goes into `comparison` or `streams_comparison`.
"""
