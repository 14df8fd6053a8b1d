"""Environment variables of MLX that Outrider sets, before MLX reads them, where the user has not.

MLX reads each of them once, when a GPU first needs it. So they are set when `runtime` is imported; nothing here imports
mlx. On a CPU none of them has an effect.
"""

from __future__ import annotations

import os

VARIABLE = "OUTRIDER_TUNE_MLX"

# MLX's scheduler counts the active tasks of the whole process: on a GPU a task is a command buffer (Metal) or a graph
# (CUDA). Above ten, each primitive of every evaluating thread is committed alone and waits. With the default sizes, one
# decode pass of a large target is 45 to 90 buffers on an M3 Ultra (mlx #4521), which leaves a drafter beside it no
# room; with these, a pass over weights of 14 GB is about seven. Buffers hold their temporaries until they are done, so
# larger ones take more memory in prefill.
VALUES = {
    "MLX_MAX_OPS_PER_BUFFER": "1000",
    "MLX_MAX_MB_PER_BUFFER": "2000",
    # Two models and passes of many widths are many graphs: the default holds 400. After 800 misses in the life of an
    # encoder MLX raises "Cache thrashing", and the encoder stays broken (mlx #4326).
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    # cuDNN's attention is planned again for each number of cached tokens, unless one token is read: on an H100 every
    # verify pass took 75 ms instead of 5. Without it, a chunk of a long prompt takes longer (60 ms instead of 19, for
    # 2,048 tokens after 14,000 in eight layers as wide as an 8B model's), but not the first time: a plan takes 70.
    "MLX_CUDA_USE_CUDNN_SDPA": "0",
}

_set_here: list[str] = []


def tune() -> None:
    """Set the variables that are not set, unless `OUTRIDER_TUNE_MLX` is 0."""
    if os.environ.get(VARIABLE) == "0":
        return
    for name, value in VALUES.items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.append(name)


def set_here() -> tuple[str, ...]:
    """The variables that `tune` has set."""
    return tuple(_set_here)
