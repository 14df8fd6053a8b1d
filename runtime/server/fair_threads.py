"""Threads for work on requests and responses that would block trio's thread; clients take turns at long work."""

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


# A body or prompt of this many bytes or characters takes a few milliseconds.
SHORT = 2**14


class FairThreads:
    """A thread for short work on requests or responses, and one for long work, at which clients take turns.

    So short work waits for short work only, and a client's long work for at most one job of each other client.
    """

    def __init__(self, background: Background) -> None:
        self._background = background
        self._short = trio.CapacityLimiter(1)
        self._long = trio.CapacityLimiter(1)
        self._turns = ClientSlots(1, 1)

    async def run(self, do: Callable[[], T], length: int, client: str) -> T:
        """The result of a function. It must use no model, as it is abandoned when the client leaves.

        Args:
            length: bytes, characters or tokens that it works on.

        Cancellation: the function still runs to its end in its thread; other work for that thread waits.
        """
        if length <= SHORT:
            return await self._background(do, abandon_on_cancel=True, limiter=self._short)
        async with self._turns.slot(client):
            return await self._background(do, abandon_on_cancel=True, limiter=self._long)
