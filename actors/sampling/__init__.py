"""Sampling: from logits to what tokens are drawn from. The draw belongs to the rules of `protocol.acceptance`."""
