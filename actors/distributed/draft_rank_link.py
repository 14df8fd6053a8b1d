"""Rank 0's way to a rank that drafts: messages there and back over the control connection, and its end.

The point-to-point sends of MLX's groups are not used. They are parts of graphs whose shapes both ends have to know
beforehand, they wait without end for a rank that hangs, and a ring sends only to neighbours in it. A lost drafter must
cost no token, so it shares no group of MLX's with the target.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from actors.distributed.connection import Connection
from protocol.errors import RankError
from protocol.rank_messages import RankMessage

logger = logging.getLogger("outrider")


class DraftRankLink:
    """The connection to the rank that drafts. The group's thread receives, and gives the messages to `put`.

    Attributes:
        rank: which one it is.
    """

    def __init__(
        self,
        rank: int,
        connection: Connection,
        on_lost: Callable[[RankError], None],
        *,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Use a connection of the group's.

        Args:
            rank: at the other end.
            connection: to it.
            on_lost: called once, in any thread, with the reason why the drafter cannot be reached any more.
            drop: called in any thread where the connection must not be used any more: part of a message was sent.
        """
        self.rank = rank
        self._connection = connection
        self._on_lost = on_lost
        self._drop = drop
        self._received: queue.SimpleQueue[RankMessage | None] = queue.SimpleQueue()
        self._numbers = count()
        self._lock = threading.Lock()
        self._error: RankError | None = None

    @property
    def error(self) -> RankError | None:
        """Why the drafter is lost; None while it is not."""
        return self._error

    def next_number(self) -> int:
        """A number for a `DraftRequest`, which no other over this link has had."""
        return next(self._numbers)

    def send(self, message: RankMessage) -> None:
        """Send a message. Raises: RankError: the drafter is lost."""
        self._check()
        try:
            self._connection.send(message)
        except OSError as error:
            self._drop()
            raise self.lose(f"rank {self.rank} has ended, or cannot be reached any more ({error})") from error

    def receive(self) -> Any:
        """Wait for the next message. To be called by one thread at a time.

        Raises: RankError: the drafter is lost.
        """
        if (message := self._received.get()) is None:
            self._received.put(None)
            self._check()
        return message

    def put(self, message: RankMessage) -> None:
        """Take a message that has come."""
        self._received.put(message)

    def lose(self, reason: str) -> RankError:
        """Give the drafter up, in any thread; harmless if it is lost.

        Args:
            reason: a clause that names the rank.

        Returns: the error; another one if the drafter was lost before.
        """
        with self._lock:
            is_first, error = self._error is None, self._error or RankError(f"the drafter is lost: {reason}")
            self._error = error
        if is_first:
            logger.warning("%s", error)
            self._on_lost(error)
            self._received.put(None)
        return RankError(*error.args)

    def close(self) -> None:
        """End the wait of a thread that was given up, if there is one: the runtime is closed."""
        self._error = self._error or RankError("the runtime was closed")
        self._received.put(None)

    def _check(self) -> None:
        if self._error is not None:
            raise RankError(*self._error.args)
