"""MLX's memory: keeps models resident, and frees unused buffers without touching other threads' streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

_lock = threading.Lock()
_num_users = 0
_limit_before: int | None = None


@contextmanager
def wired_memory() -> Iterator[None]:
    """While in force, in any number of runtimes, let Metal keep the models resident, as mlx-lm does."""
    global _num_users, _limit_before
    with _lock:
        if _num_users == 0:
            _limit_before = maybe_set_recommended_wired_limit()
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _num_users == 0 and _limit_before is not None:
                mx.set_wired_limit(_limit_before)


def recommended_working_set() -> int | None:
    """The most bytes that the device recommends to use; None on a device that does not tell, such as a CPU."""
    return cast(int | None, mx.device_info().get("max_recommended_working_set_size"))


def release_buffers() -> None:
    """Free the buffers that a GPU's allocator keeps for later use.

    Not on a CPU, which keeps 32 MB at most: there `mx.clear_cache` waits for the streams of all threads, and takes the
    error with which one has failed, so that its job would go on with wrong numbers.
    """
    if mx.metal.is_available() or mx.cuda.is_available():
        # On CUDA, what another thread's kernel has failed with is raised here, too, and stays to be raised there.
        with suppress(RuntimeError):
            mx.clear_cache()
