"""A draft model of another vocabulary than its target's, behind the interface of `actors.model`.

* `translated_model`: the model (`TranslatedModel`).
* `translated_sequence`: one text in its cache (`TranslatedSequence`).
* `reduced_head`: a model of the target's vocabulary that drafts only part of it.

`protocol.vocabulary_map` decides which tokens of the draft model a token of the target is read as.
"""
