"""A worker in simulated time: no thread, and a job takes what it would cost.

Under trio's autojumping `MockClock` the real actors, tree and rules then run thousands of rounds a
second, deterministically, for any cost of verifying and drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import outcome
import trio

from actors.worker import Job, as_job_error
from protocol.trace import Actor, Event, Span

T = TypeVar("T")


class SimulatedWorker:
    """A worker that sleeps on trio's clock for a job's price, then does it in the caller's task."""

    def __init__(
        self,
        actor: Actor,
        price: Callable[[Job[Any]], float],
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """A worker.

        Args:
            actor: whose it is.
            price: seconds that a job takes, >= 0.
            on_event: called with the span of each finished job.
        """
        self._actor = actor
        self._price = price
        self._on_event = on_event
        # trio's lock is fair: jobs are done in the order in which they were handed in.
        self._turn = trio.Lock()
        self._busy_seconds = 0.0

    async def __aenter__(self) -> SimulatedWorker:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            async with self._turn:
                pass

    @property
    def busy_seconds(self) -> float:
        """See `Worker.busy_seconds`."""
        return self._busy_seconds

    def clock(self) -> float:
        """Seconds on trio's clock."""
        return trio.current_time()

    async def run(self, job: Job[T]) -> T:
        """See `Worker.run`."""
        async with self._turn:
            # As with a thread: what has begun is not abandoned.
            with trio.CancelScope(shield=True):
                began = self.clock()
                await trio.sleep(self._price(job))
                result = outcome.capture(job.call)
                ended = self.clock()
        job.seconds = ended - began
        self._busy_seconds += job.seconds
        if self._on_event is not None:
            self._on_event(Span(self._actor, job.kind, job.session, began, ended, job.num_tokens, job.round))
        return as_job_error(job, result).unwrap()  # type: ignore[no-any-return]
