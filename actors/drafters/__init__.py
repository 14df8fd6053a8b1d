"""Drafters: the actors that propose tokens.

`drafter` has the base classes, `DrafterSession` and `Drafter`. `draft_actor` drafts with a draft model (its state of a
session is in `draft_session`, its jobs on the model's thread in `draft_steps`); `lookup_actor` drafts without a model,
from the text itself. A new kind of drafter goes here: one with a trained head that reads the target's hidden states
gets a module of its own, and its jobs stand beside it, as `draft_steps` does.
"""
