"""Threads for work that would block trio's thread, and slots at which clients take turns."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import trio

T = TypeVar("T")


class Background(Protocol):
    """Runs a function in the background while trio runs other tasks."""

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        """The result of `do`; see `trio.to_thread.run_sync`."""


# mypy does not see that `run_sync` needs no further positional arguments.
in_thread: Background = trio.to_thread.run_sync  # type: ignore[assignment]


class ClientSlots:
    """A limited number of slots, with a smaller limit for each client; waiting clients take turns."""

    def __init__(self, total: int, per_client: int) -> None:
        self._num_free = total
        self._per_client = per_client
        self._num_held: Counter[str] = Counter()  # by client
        # Waiting tasks by client; the clients are in the order of their turns.
        self._waiting: dict[str, deque[trio.Event]] = {}

    @property
    def num_waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Hold a slot for the duration of the block. Cancellation: stops waiting."""
        granted = trio.Event()
        self._waiting.setdefault(client, deque()).append(granted)
        self._grant()
        try:
            await granted.wait()
            yield
        finally:
            if granted.is_set():
                self._num_free += 1
                self._num_held[client] -= 1
                self._num_held += Counter()  # drops clients with 0
                self._grant()
            else:
                self._stop_waiting(client, granted)

    def _grant(self) -> None:
        """Grant the free slots; each goes to the waiting client that holds the fewest."""
        while self._num_free:
            ready = [client for client in self._waiting if self._num_held[client] < self._per_client]
            if not ready:
                return
            client = min(ready, key=lambda client: self._num_held[client])
            self._num_free -= 1
            self._num_held[client] += 1
            granted = self._waiting[client][0]
            granted.set()
            queue = self._waiting[client]
            self._stop_waiting(client, granted)
            if queue:
                self._waiting[client] = self._waiting.pop(client)  # to the end: the others' turn

    def _stop_waiting(self, client: str, granted: trio.Event) -> None:
        queue = self._waiting[client]
        queue.remove(granted)
        if not queue:
            del self._waiting[client]
