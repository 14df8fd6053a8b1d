"""Work beside trio's thread, behind an interface: simulated time does not wait for threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Background(Protocol):
    """What does something while trio goes on with the rest."""

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        """What `do` returns; see `trio.to_thread.run_sync`."""


async def in_thread(do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
    """`trio.to_thread.run_sync`; in simulated time, which does not wait for threads, another takes its place."""
    return await trio.to_thread.run_sync(do, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
