"""A draft model of another vocabulary, behind the interface of `actors.model` as if it had its target's tokens.

* `translated_model`: the model (`TranslatedModel`).
* `translated_sequence`: one text in its cache (`TranslatedSequence`).

`protocol.vocabulary_map` decides which tokens of the draft model a token of the target is read as.
"""
