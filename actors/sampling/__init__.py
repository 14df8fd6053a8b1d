"""Sampling: from logits to the distribution that tokens are drawn from, for target and drafter alike.

* `logits_pipeline`: logit bias, penalties, processors, and filters such as top-p. A new sampler or filter of Outrider's
  own goes there, among the filters.
* `user_code`: calls the logits processors and the sampler that a user gives, and tells their errors from a model's.
* `logit_check`: whether logits are numbers.

The draw itself belongs to the acceptance rules: `protocol.acceptance`.
"""
