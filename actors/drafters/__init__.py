"""Drafters: the actors that propose tokens.

* `drafter`: the base classes `Drafter` and `DrafterSession`.
* `draft_actor`: drafts with a draft model. Its state of a session is in `draft_session`, its jobs on the model's thread
  in `draft_steps`.
* `lookup_actor`: drafts without a model, by prompt lookup in the session's own text.

A new actor that drafts goes here, as a subclass of `Drafter`.
"""
