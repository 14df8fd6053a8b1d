"""A draft model of another vocabulary, behind the interface of `actors.model` as if it had its target's tokens.

* `translated_model`: the model (`TranslatedModel`).
* `translated_sequence`: one text in its cache (`TranslatedSequence`).

What is read as what is decided in `protocol.vocabulary_map`.
"""
