"""The link between rank 0 and a rank that drafts, over the control connection.

MLX's point-to-point sends need shapes that both ends know beforehand, wait forever for a rank that hangs, and reach
only neighbours in a ring. A lost drafter must cost no token, so it shares no group of MLX's with the target.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from actors.distributed.connection import RankConnection
from actors.remote.link import LinkLostError
from protocol.errors import RankError
from protocol.rank_messages import CloseTarget, ForDrafter, RankMessage


class DraftRankLink:
    """One end of the link; see `Link`. The group's thread receives, and watches the other rank's heartbeats."""

    def __init__(self, rank: int, connection: RankConnection, *, drop: Callable[[], None] = lambda: None) -> None:
        """Use a connection of the group's, in trio's thread. `drop` is called, in any thread, once it is broken."""
        self.rank = rank  # at the other end
        self.name = f"rank {rank}"  # of the rank
        self.is_over = trio.Event()  # set once that rank is lost, or has closed the target
        # Whether that rank has closed the target. What it sends from then on is about the next one.
        self.has_closed_target = False
        self._connection = connection
        self._drop = drop
        self._trio_token = trio.lowlevel.current_trio_token()
        self._sending, self._unsent = trio.open_memory_channel[bytes](math.inf)
        self._putting, self._arrived = trio.open_memory_channel[bytes](math.inf)
        self._lock = threading.Lock()
        self.error: RankError | None = None  # why the drafter is lost; None while it is not
        self._is_closed = False

    def send(self, data: bytes) -> None:
        self._sending.send_nowait(data)

    @property
    def is_behind(self) -> bool:
        return self._unsent.statistics().current_buffer_used > 0

    async def run(self) -> None:
        async for data in self._unsent:
            if self.error is None:
                # The rank may take nothing for a while.
                await trio.to_thread.run_sync(self._send, data)

    def _send(self, data: bytes) -> None:
        try:
            self._connection.send(ForDrafter(data))
        except OSError as error:
            self._drop()
            self.lose(f"{self.name} has ended, or cannot be reached any more ({error})")

    async def receive(self) -> bytes:
        try:
            message = await self._arrived.receive()
        except trio.EndOfChannel:
            raise LinkLostError(str(self.error or f"{self.name} has closed the target")) from None
        if not message:
            raise LinkLostError(f"{self.name} has closed the link")
        return message

    def put(self, message: RankMessage) -> None:
        """Take a message that has arrived, in any thread. Messages that are not about a drafter are ignored."""
        if isinstance(message, ForDrafter):
            self._in_trio(partial(self._deliver, message.data))
        elif isinstance(message, CloseTarget):
            self.has_closed_target = True
            self._in_trio(self._end)

    def lose(self, reason: str) -> RankError:
        """Give the drafter up, in any thread. Returns: the error, which gives the reason of the first call."""
        with self._lock:
            is_first, error = self.error is None, self.error or RankError(reason)
            self.error = error
        if is_first:
            self._in_trio(self._end)
        return RankError(*error.args)

    def _deliver(self, message: bytes) -> None:
        with suppress(trio.ClosedResourceError):  # another thread has noticed first that the link is lost
            self._putting.send_nowait(message)

    def _end(self) -> None:
        self._putting.close()
        self.is_over.set()

    def _in_trio(self, call: Callable[[], None]) -> None:
        with suppress(trio.RunFinishedError):  # nobody waits for it
            self._trio_token.run_sync_soon(call)

    def close(self) -> None:
        if not (self.is_over.is_set() or self._is_closed):
            self._is_closed = True
            self._send(b"")
