"""A model's part of a saved session. The state of the caches is in `actors.mlx`; the file's format, in
`runtime.persistence`.
"""
