"""The models of a server: each is loaded for its first request, and unloaded again.

`served_model` says what a model is, and reads such descriptions from a TOML file. `pool` decides which models are
loaded when, and hands them to requests; a server of one model has a pool of one, which is loaded at the start and
stays.
"""
