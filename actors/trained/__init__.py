"""Drafters that are trained for one target, and read its hidden states."""
