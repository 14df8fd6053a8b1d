"""A draft model of another vocabulary than its target's, behind the interface of `actors.model`.

`protocol.vocabulary_map` decides which tokens of the draft model a token of the target is read as.
"""
