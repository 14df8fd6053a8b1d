"""What a draft model buys on a machine that a few numbers describe: the real scheduling in simulated time.

`scenario` has the numbers (and `sharding` those of a target over several machines), `scripted_models` the pair of
models that behaves by them, and `simulation` runs the real runtime over that pair. `comparison` compares ways of
decoding, and `plot` draws what it finds.

A new property of machines or models is a field of `Scenario`, and with it an option of `outrider simulate`. A new way
of decoding to compare is one of the `ways` in `comparison`, a new figure one of its `figures`.
"""
