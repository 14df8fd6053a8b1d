"""A draft model of another vocabulary, behind the interface of `actors.model` as if it had its target's tokens.

`protocol.vocabulary_map` decides which tokens of the draft model a token of the target is read as.
"""
