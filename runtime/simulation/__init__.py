"""What a draft model gains on a machine described by a few numbers: the real scheduling in simulated time.

`scenario` has the numbers (and `sharding` those of a target over several machines), `scripted_models` a pair of
models that behaves accordingly, and `simulation` runs the real runtime over that pair. `comparison` compares ways of
decoding.

To add a property of machines or models, add a field to `Scenario`: it becomes an option of `outrider simulate`. A way
of decoding goes into the `ways` in `comparison`, a figure into its `figures`.
"""
