"""A model's part of a saved session.

* `fingerprint`: identifies a model, so that caches are only loaded into the model that filled them.
* `saved_sequence`: takes a session's cached sequence from an actor, and gives a saved one to it.
* `rank_parts`: the parts of a cached sequence, on their way between the ranks of a sharded model.

The state of the caches themselves is in `actors.mlx`; the file and its format are in `runtime.persistence`.
"""
