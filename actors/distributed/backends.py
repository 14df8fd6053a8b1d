"""The backends of `mx.distributed`: which this machine's MLX has, and which one connects the ranks."""

from __future__ import annotations

import os

import mlx.core as mx

from actors.distributed.rank_group import RankGroup

# In the order in which MLX tries them, each with the environment variable that says where its ranks are.
BACKENDS = {
    "nccl": "NCCL_HOST_IP",
    "ring": "MLX_HOSTFILE",
    "mpi": "OMPI_COMM_WORLD_RANK",
    "jaccl": "MLX_JACCL_COORDINATOR",
}


def available_backends() -> tuple[str, ...]:
    """The backends that this machine's MLX has."""
    return tuple(name for name in BACKENDS if mx.distributed.is_available(backend=name))


def chosen_backend(group: RankGroup) -> str | None:
    """The backend of MLX's group; None if MLX does not tell. This blocks."""
    for name in available_backends():
        # Only backends that MLX itself has tried: for any other it would look for ranks again.
        if os.environ.get(BACKENDS[name]) and mx.distributed.init(backend=name).size() == group.size:
            return name
    return None
