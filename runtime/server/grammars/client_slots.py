"""Slots for work that clients ask for, so that one client's does not keep another's waiting."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class ClientSlots:
    """Slots, of which one client has only some at a time, and for which clients wait in turn.

    Attributes:
        num_waiting: pieces of work that wait for a slot.
    """

    def __init__(self, total: int, per_client: int) -> None:
        """All free.

        Args:
            total: pieces of work at a time, >= 1.
            per_client: of one client, from 1 to `total`.
        """
        self._num_free = total
        self._per_client = per_client
        self._num_held: Counter[str] = Counter()
        # By client, in the order of their turns.
        self._waiting: dict[str, deque[trio.Event]] = {}

    @property
    def num_waiting(self) -> int:
        """See `ClientSlots`."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """A slot for the duration of the block.

        Cancellation: gives up waiting.
        """
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
                self._num_held += Counter()  # without those that have none
                self._grant()
            else:
                self._leave(client, granted)

    def _grant(self) -> None:
        """Give what is free to who waits, to each client one before any has its second."""
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
            self._leave(client, granted)
            if queue:
                self._waiting[client] = self._waiting.pop(client)  # the others' turn

    def _leave(self, client: str, granted: trio.Event) -> None:
        queue = self._waiting[client]
        queue.remove(granted)
        if not queue:
            del self._waiting[client]
