"""The interface to background threads; tests in simulated time, which does not wait for threads, replace it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Background(Protocol):
    """Runs a function in the background while trio runs other tasks."""

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        """The result of `do`; see `trio.to_thread.run_sync`."""


async def in_thread(do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
    """`trio.to_thread.run_sync`, as a `Background`."""
    return await trio.to_thread.run_sync(do, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
