"""The doctor: examines a model or a pair on this machine, and says what speed to expect.

`report` examines (with `runtime.measuring.pass_times`) and describes, `conclusion` says what follows, `agreement`
measures how often a trained drafter is right, `ranks` examines the ranks of a sharded target, and `checks` are those of
`--check`. A new finding is a field of `Diagnosis`, which `examine` measures and `report` shows. A new remedy goes into
`conclusion`.
"""
