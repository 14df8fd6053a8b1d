"""MLX's memory: kept resident while it is needed, and given back without holding up the rest of the process.

`mx.clear_cache` waits, on CPU, for what other threads are evaluating, which may be a chunk of a long prompt, and holds
Python's lock meanwhile: every other thread stands still, an event loop among them. Called through ctypes, the same
function of MLX's waits without the lock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

# mlx::core::clear_cache(), as compilers on Linux and macOS name it.
_SYMBOL = "_ZN3mlx4core11clear_cacheEv"


@contextmanager
def wired_memory() -> Iterator[None]:
    """Let Metal keep the models resident while in force, as mlx-lm does while it generates."""
    before = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if before is not None:
            mx.set_wired_limit(before)


def peak_memory() -> int:
    """Most bytes that MLX has held at once in this process."""
    return mx.get_peak_memory()


def release_buffers() -> None:
    """Have MLX keep no buffers that nobody uses."""
    if mx.get_cache_memory() > 0:
        (_without_the_lock() or mx.clear_cache)()


@cache
def _without_the_lock() -> Callable[[], None] | None:
    """`mx.clear_cache` as a foreign function; None where it is not found."""
    libraries = sorted((Path(mx.__file__).parent / "lib").glob("libmlx.*"))
    for library in libraries:
        try:
            function = ctypes.CDLL(str(library))[_SYMBOL]
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [], None
        return cast(Callable[[], None], function)
    return None
