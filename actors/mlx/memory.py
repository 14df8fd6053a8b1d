"""MLX's memory: keeps models resident, and frees unused buffers without stalling other threads.

On CPU, `mx.clear_cache` waits for other threads' evaluations, such as a chunk of a long prompt, with the GIL held, so
that the event loop stands still. Called through ctypes, the same function waits without the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

# mlx::core::clear_cache(), as compilers on Linux and macOS name it.
_SYMBOL = "_ZN3mlx4core11clear_cacheEv"

_lock = threading.Lock()
_num_users = 0
_limit_before: int | None = None


@contextmanager
def wired_memory() -> Iterator[None]:
    """While in force, let Metal keep the models resident, as mlx-lm does while it generates. Several runtimes may
    enter, in any threads; the last one that leaves restores the limit.
    """
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
    """Free the buffers that MLX keeps for later use. Releases the GIL meanwhile, if MLX's function is found."""
    if mx.get_cache_memory() > 0:
        (_clear_cache_without_gil() or mx.clear_cache)()


@cache
def _clear_cache_without_gil() -> Callable[[], None] | None:
    """MLX's `clear_cache` as a foreign function, which releases the GIL; None if it is not found."""
    libraries = sorted((Path(mx.__file__).parent / "lib").glob("libmlx.*"))
    for library in libraries:
        try:
            function = ctypes.CDLL(str(library))[_SYMBOL]
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [], None
        return cast(Callable[[], None], function)
    return None
