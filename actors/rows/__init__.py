"""Texts as rows of shared caches: batches, the texts in them, and which texts are rows from pass to pass."""
