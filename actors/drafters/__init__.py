"""Drafters: a draft model, or prompt lookup without one. A new kind of drafter goes here."""
