"""The work on long requests and responses that would hold up trio's thread, such as tokenising a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from runtime.server.background import Background
from runtime.server.grammars.client_slots import ClientSlots

T = TypeVar("T")

# A body or prompt of this many bytes or characters takes a few milliseconds.
SHORT = 2**14


class Lanes:
    """Two threads for work on requests or responses: one for short ones, and one for long ones, at which clients take
    turns.

    So a short one waits for short ones only, however many long ones there are, and a client with a long one for at most
    one of each other client.
    """

    def __init__(self, background: Background) -> None:
        """Nothing to do yet.

        Args:
            background: runs the functions.
        """
        self._background = background
        self._short = trio.CapacityLimiter(1)
        self._long = trio.CapacityLimiter(1)
        self._turns = ClientSlots(1, 1)

    async def run(self, do: Callable[[], T], length: int, client: str) -> T:
        """The result of a function.

        Args:
            do: uses no model: it is abandoned when the client leaves.
            length: bytes, characters or tokens that it works on.
            client: the client's address.

        Cancellation: the function runs to its end in its thread, for which others of its length wait.
        """
        if length <= SHORT:
            return await self._background(do, abandon_on_cancel=True, limiter=self._short)
        async with self._turns.slot(client):
            return await self._background(do, abandon_on_cancel=True, limiter=self._long)
