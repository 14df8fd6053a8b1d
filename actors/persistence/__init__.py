"""A model's part of a saved session: its fingerprint, and the cached tokens."""
