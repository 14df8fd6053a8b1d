"""Drafters: the actors that propose tokens.

* `drafter`: the base classes `Drafter` and `DrafterSession`.
* `draft_actor`: drafts with a draft model. Its state of a session is in `draft_session`, its jobs on the model's thread
  in `draft_steps`.
* `lookup_actor`: drafts without a model, by prompt lookup in the session's own text.

A new drafter goes here, as a subclass of `Drafter` in a module of its own, with its jobs in a module beside it. A
trained head that reads the target's hidden states is such a drafter.
"""
