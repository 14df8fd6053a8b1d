"""Jobs that wait for their turn before they are handed to a worker."""

from __future__ import annotations

from typing import TypeVar

import attrs
import trio

from actors.workers.worker import Job, Worker

T = TypeVar("T")


@attrs.frozen
class InTurn:
    """Hands a worker one job at a time, in the order in which they were asked for.

    Whoever holds `turn` decides what the worker does next, and knows that it can begin at once.
    """

    worker: Worker
    turn: trio.Lock

    async def run(self, job: Job[T]) -> T:
        async with self.turn:
            return await self.worker.run(job)
