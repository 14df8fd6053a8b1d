"""Threads for work that would block trio's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Background(Protocol):
    """Runs a function in the background while trio runs other tasks."""

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        """The result of `do`; see `trio.to_thread.run_sync`."""


# mypy does not see that `run_sync` needs no further positional arguments.
in_thread: Background = trio.to_thread.run_sync  # type: ignore[assignment]
