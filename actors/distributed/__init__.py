"""A target that is sharded over several processes, its ranks, by MLX's own distributed engine.

Rank 0 runs everything as one process would, and announces each operation on the target's caches; the other ranks repeat
it on their part of the weights. A control connection from each rank to rank 0 carries the announcements and heartbeats;
tensors go through MLX's collectives, inside the forward passes.

One rank may hold the drafter, and nothing of the target: see `drafting`.
"""
