"""The actors: the target and the drafter, as trio tasks that exchange messages and send jobs to their models' threads.

Actors:

* `actor`: the base classes, with a mailbox, the sessions as values, and one loop.
* `target`: verifies proposals and commits tokens.
* `drafters`: what proposes tokens. A new drafter goes there.
* `distributed`: a target that is sharded over several processes.
* `session`: the state of a session that the runtime and both actors share.

Models and what they compute:

* `model`: the interface of a model and of a cached sequence.
* `mlx`: mlx-lm's models and caches behind that interface. A new cache class goes there.
* `trained`: drafters that were trained for their target, and read its hidden states.
* `translated`: a draft model of another vocabulary behind that interface, with its target's tokens.
* `sampling`: from logits to the distribution that tokens are drawn from. A new sampler or filter goes there.
* `workers`: what runs the jobs of one model, on a thread or in simulated time.

Texts:

* `prefill`: feeds a prompt, in passes of bounded size.
* `prefix_cache`: cached sequences of texts that are over, for texts with the same beginning.
* `prompt_cache`: texts that continue a prompt cache file of mlx-lm.
* `persistence`: a model's part of a saved session.
* `tensor`: an array's bytes, for files.

Checks and measurements:

* `probe`: whether a model works at all.
* `warm_up`: the first measurement of the prices.
"""
