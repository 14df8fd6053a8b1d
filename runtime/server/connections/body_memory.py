"""The memory for request bodies that are being read, shared by all requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

# Bytes of each body that need no claim, so that a short request never waits for long ones.
FREE_BYTES = 2**14


@attrs.define(eq=False)
class Claim:
    """The memory of one body beyond its first `FREE_BYTES`.

    Attributes:
        num_bytes: claimed; 0 before `wait_for`.
    """

    _memory: BodyMemory
    num_bytes: int = 0

    async def wait_for(self, num_bytes: int) -> None:
        """Claim so many bytes, once there is room for them; to be called once.

        Cancellation: nothing is claimed.
        """
        await self._memory._wait_for(self, num_bytes)


class BodyMemory:
    """A bound on the bytes of all bodies together. Bodies wait for room in the order in which they ask for it.

    A body claims all that it may need at once: of two that had half of it each, neither could be completed.
    """

    def __init__(self, max_bytes: int) -> None:
        """All free.

        Args:
            max_bytes: of all claims together, >= that of one.
        """
        self._num_free = max_bytes
        self._waiting: deque[tuple[Claim, int, trio.Event]] = deque()

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """A claim, which is given up at the end of the block."""
        claim = Claim(self)
        try:
            yield claim
        finally:
            self._num_free += claim.num_bytes
            self._grant()

    async def _wait_for(self, claim: Claim, num_bytes: int) -> None:
        entry = claim, num_bytes, trio.Event()
        self._waiting.append(entry)
        self._grant()
        try:
            await entry[2].wait()
        except trio.Cancelled:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._grant()
            raise

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][1] <= self._num_free:
            claim, num_bytes, granted = self._waiting.popleft()
            self._num_free -= num_bytes
            claim.num_bytes = num_bytes
            granted.set()
