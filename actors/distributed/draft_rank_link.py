"""Rank 0's link to a rank that drafts, over the control connection.

The point-to-point sends of MLX's groups are not used. They are parts of graphs whose shapes both ends have to know
beforehand, they wait without end for a rank that hangs, and a ring sends only to neighbours in it. A lost drafter must
cost no token, so it shares no group of MLX's with the target.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator

import trio

from actors.distributed.connection import Connection
from actors.remote.link import LinkLostError
from protocol.errors import RankError
from protocol.rank_messages import DrafterFrame, RankMessage

# Bytes in one message: a heartbeat waits no longer than for one.
MAX_FRAME_BYTES = 4 * 1024**2


def frames(data: bytes) -> Iterator[DrafterFrame]:
    """The parts in which a message of a link travels."""
    for begin in range(0, len(data), MAX_FRAME_BYTES):
        end = begin + MAX_FRAME_BYTES
        yield DrafterFrame(data[begin:end], end >= len(data))


class DraftRankLink:
    """The link to the rank that drafts; see `Link`. The group's thread receives, and watches the rank's heartbeats.

    Attributes:
        rank: which one it is.
        name: of the rank.
    """

    def __init__(self, rank: int, connection: Connection, *, drop: Callable[[], None] = lambda: None) -> None:
        """Use a connection of the group's. To be called in trio's thread.

        Args:
            rank: at the other end.
            connection: to it.
            drop: called in any thread where the connection must not be used any more: part of a message was sent.
        """
        self.rank = rank
        self.name = f"rank {rank}"
        self._connection = connection
        self._drop = drop
        self._trio_token = trio.lowlevel.current_trio_token()
        self._sending, self._unsent = trio.open_memory_channel[bytes](math.inf)
        self._putting, self._arrived = trio.open_memory_channel[bytes | None](math.inf)  # None: it is lost
        self._parts: list[bytes] = []
        self._lock = threading.Lock()
        self._error: RankError | None = None

    @property
    def error(self) -> RankError | None:
        """Why the drafter is lost; None while it is not."""
        return self._error

    def send(self, data: bytes) -> None:
        self._sending.send_nowait(data)

    @property
    def is_behind(self) -> bool:
        return self._unsent.statistics().current_buffer_used > 0

    async def run(self) -> None:
        async for data in self._unsent:
            if self._error is None:
                # The rank may take nothing for a while.
                await trio.to_thread.run_sync(self._send, data)

    def _send(self, data: bytes) -> None:
        try:
            for frame in frames(data) if data else (DrafterFrame(b""),):
                self._connection.send(frame)
        except OSError as error:
            self._drop()
            self.lose(f"{self.name} has ended, or cannot be reached any more ({error})")

    async def receive(self) -> bytes:
        message = None if self._error is not None else await self._arrived.receive()
        if message is None:
            raise LinkLostError(str(self._error))
        return message

    def put(self, message: RankMessage) -> None:
        """Take a message that has come, in any thread. Others than a drafter's are ignored."""
        if isinstance(message, DrafterFrame):
            self._parts.append(message.data)
            if message.is_last:
                self._put(b"".join(self._parts))
                self._parts.clear()

    def lose(self, reason: str) -> RankError:
        """Give the drafter up, in any thread; harmless if it is lost.

        Args:
            reason: a clause that names the rank.

        Returns: the error; another one if the drafter was lost before.
        """
        with self._lock:
            is_first, error = self._error is None, self._error or RankError(reason)
            self._error = error
        if is_first:
            self._put(None)
        return RankError(*error.args)

    def _put(self, message: bytes | None) -> None:
        try:
            self._trio_token.run_sync_soon(self._putting.send_nowait, message)
        except trio.RunFinishedError:
            return  # nobody waits for it

    def close(self) -> None:
        """See `Link.close`. The rank may be asked for another drafter."""
        if self._error is None:
            self._send(b"")
