"""The actors: the target and the drafter, as trio tasks that exchange messages and send jobs to their models' threads.

Actors:

* `actor`: the base classes, with a mailbox and one task for each session.
* `target`: verifies proposals and commits tokens; its jobs on the model's thread are in `target_jobs`.
* `drafters`: what proposes tokens. A new drafter goes there.
* `session`: the state of a session that the runtime and both actors share.

Models and what they compute:

* `model`: the interface of a model and of a cached sequence.
* `mlx`: mlx-lm's models and caches behind that interface. A new cache class goes there.
* `translated`: a draft model of another vocabulary behind that interface, with its target's tokens.
* `sampling`: from logits to the distribution that tokens are drawn from. A new sampler or filter goes there.
* `workers`: what runs the jobs of one model, on a thread or in simulated time.

Texts:

* `prefill`: feeds a prompt, in passes of bounded size.
* `prefix_cache`: cached sequences of texts that are over, for texts with the same beginning.
* `persistence`: a model's part of a saved session.
* `tensor`: an array's bytes, for files.

Checks and measurements:

* `probe`: whether a model works at all.
* `warm_up`: the first measurement of the prices.
"""
