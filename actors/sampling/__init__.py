"""Sampling: from logits to the distribution that tokens are drawn from, for target and drafter alike. A new sampler or
filter goes into `logits_pipeline`. The draw itself belongs to the acceptance rules: `protocol.acceptance`.
"""
