"""A worker in simulated time: it has no thread, and a job takes as long as its price says.

Under trio's autojumping `MockClock`, the real actors run thousands of rounds a second, deterministically.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import outcome
import trio

from actors.workers.worker import Job, Steps, as_job_error
from protocol.trace import ActorName, Event, Span, SpanKind

T = TypeVar("T")

# Jobs that go through a model, and so need the device.
_COMPUTES: frozenset[SpanKind] = frozenset({"warm-up", "prefill", "draft", "verify", "decode"})


@attrs.define(eq=False)
class _Running:
    """A job, and the seconds that it would still take alone, as of the last change of pace."""

    remaining_s: float
    scope: trio.CancelScope


class Contention:
    """A device that simulated workers share. Two jobs at once progress at 1 / (1 + kappa) of their pace each: kappa is
    0 for separate hardware and 1 for a device that one of them saturates.
    """

    def __init__(self, kappa: float) -> None:
        self.kappa = kappa
        self._running: list[_Running] = []
        self._changed_at = 0.0

    async def compute(self, seconds: float) -> None:
        """Run a job that would take `seconds` alone. Cancellation: none; a job that has begun is not abandoned."""
        # Each change of pace moves the deadlines of all running jobs, so a task wakes up only when its job is done.
        running = _Running(seconds, trio.CancelScope(shield=True))
        with running.scope:
            self._change_pace(joins=running)
            await trio.sleep_forever()
        self._change_pace(leaves=running)

    def _change_pace(self, joins: _Running | None = None, leaves: _Running | None = None) -> None:
        now = trio.current_time()
        elapsed, slowdown = now - self._changed_at, self._slowdown()
        self._changed_at = now
        for running in self._running:
            running.remaining_s -= elapsed / slowdown
        if leaves is not None:
            self._running.remove(leaves)
        if joins is not None:
            self._running.append(joins)
        slowdown = self._slowdown()
        for running in self._running:
            running.scope.deadline = now + running.remaining_s * slowdown

    def _slowdown(self) -> float:
        return 1.0 + self.kappa * max(0, len(self._running) - 1)


async def _sleep_uncancelled(seconds: float) -> None:
    """As on a thread, a job that has begun is not abandoned."""
    if seconds > 0:
        # One scope both shields and ends the sleep; two would cost twice as much.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + seconds):
            await trio.sleep_forever()
    else:
        await trio.lowlevel.cancel_shielded_checkpoint()


class SimulatedWorker:
    """A worker that sleeps on trio's clock for a job's price, then runs the job in the caller's task."""

    def __init__(
        self,
        actor: ActorName,
        price: Callable[[Job[Any]], float],
        on_event: Callable[[Event], None] | None = None,
        contention: Contention | None = None,
    ) -> None:
        """`price` gives the seconds that a job takes."""
        self._actor = actor
        self._price = price
        self._on_event = on_event
        self._contention = contention if contention is not None and contention.kappa > 0 else None
        # trio's lock is fair: jobs run in the order in which they were handed in.
        self._lock = trio.Lock()
        self._busy_seconds = 0.0

    async def __aenter__(self) -> SimulatedWorker:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):
            async with self._lock:
                pass

    @property
    def is_alive(self) -> bool:
        return True

    @property
    def is_hanging(self) -> bool:
        return False

    @property
    def overdue_s(self) -> float:
        return -math.inf

    def watch(self) -> None:
        """No simulated job hangs."""

    @property
    def busy_seconds(self) -> float:
        return self._busy_seconds

    def clock(self) -> float:
        """Seconds on trio's clock."""
        return trio.current_time()

    async def run(self, job: Job[T]) -> T:
        async with self._lock:
            result = await self._run_one(job)
        self._announce(job, job.round)
        return as_job_error(job, result).unwrap()

    async def run_steps(self, steps: Steps[Any], *, meanwhile: Callable[[], None] | None = None) -> None:
        """As `Worker.run_steps`; `Steps.on_step` is called before the next step begins."""
        if meanwhile is not None:
            meanwhile()
        await self._run_in_row(steps, lambda *step: steps.hand_over(*step).unwrap())

    async def _run_in_row(self, steps: Steps[Any], hand_over: Callable[..., None]) -> None:
        """Run steps, with each of which `hand_over` is called as `Steps.hand_over` is."""
        async with self._lock:
            following: Job[Any] | None = steps.first()
            while following is not None:
                job, result = following, await self._run_one(following)
                self._announce(job, steps.round)
                step = as_job_error(job, result).unwrap()
                following = None if self._is_wanted_elsewhere() else steps.following(step)
                hand_over(job, step.result, following is not None)
                if steps.is_interrupted:
                    return

    def _is_wanted_elsewhere(self) -> bool:
        """Whether another job waits for the worker, or the call that waits for this one was cancelled."""
        return self._lock.statistics().tasks_waiting > 0 or trio.current_effective_deadline() == -math.inf

    async def _run_one(self, job: Job[T]) -> outcome.Outcome[T]:
        began = self.clock()
        seconds = self._price(job)
        if self._contention is not None and job.kind in _COMPUTES:
            await self._contention.compute(seconds)
        else:
            await _sleep_uncancelled(seconds)
        result = job.run()
        job.began, job.ended = began, self.clock()
        return result

    def _announce(self, job: Job[Any], round: int | None) -> None:
        self._busy_seconds += job.seconds
        if self._on_event is not None:
            span = Span(self._actor, job.kind, job.session, job.began, job.ended, job.num_tokens, round, job.shares)
            self._on_event(span)
