"""A target that is sharded over several processes, its ranks, by MLX's own distributed engine.

Rank 0 runs everything as one process would, and announces each operation on the target's caches; the other ranks repeat
it on their part of the weights. Announcements and heartbeats go over a control connection from each rank to rank 0,
tensors through MLX's collectives, inside the passes. One rank may hold the drafter, and nothing of the target.
"""
