"""The two models at work: threads, caches, forward passes, and the tasks that exchange messages.

* `worker`: an owned thread to which a task hands jobs; `simulated` has one without a thread.
* `model`: what the actors need of a model; behind it, `mlx_model` and `mlx_line`: mlx-lm's models and caches.
* `target`, `draft`: the actors.
"""
