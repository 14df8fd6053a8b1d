"""A target that is sharded over several processes, its ranks, by MLX's own distributed engine.

Rank 0 runs everything as one process would, and announces each operation on the target's caches over control
connections; the others repeat it on their part of the weights. One rank may hold the drafter, and nothing of the
target.
"""
