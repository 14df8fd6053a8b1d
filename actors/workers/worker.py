"""The interface of a worker, which runs the jobs of one model, one at a time; and what it runs: jobs and steps."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import attrs
import outcome

from protocol.errors import OutriderError
from protocol.trace import Share, SpanKind

T = TypeVar("T")


@attrs.define(eq=False)
class Job(Generic[T]):
    """One call for a worker to make, in the round of a session."""

    kind: SpanKind
    call: Callable[[], T]  # on the worker's thread. Its result crosses threads: only ints and evaluated arrays.
    session: int | None = None
    num_tokens: int = 0  # that go through the model; once the job is done, what `count`, if given, makes of its result
    round: int | None = None
    count: Callable[[T], int] | None = None
    shares: tuple[Share, ...] = ()  # see `Span`
    # Seconds on the worker's clock, set once the job is done.
    began: float = attrs.field(default=0.0, init=False)
    ended: float = attrs.field(default=0.0, init=False)

    @property
    def seconds(self) -> float:
        """Duration of the job, once it is done."""
        return self.ended - self.began

    def run(self) -> outcome.Outcome[T]:
        result = outcome.capture(self.call)
        if self.count is not None and isinstance(result, outcome.Value):
            self.num_tokens = self.count(result.value)
        return result


@attrs.frozen
class Step(Generic[T]):
    """What one of several steps returns: a result, which crosses threads, and the next step, if there is one."""

    result: T
    next_call: Callable[[], Step[T]] | None = None
    num_tokens: int = 1
    shares: tuple[Share, ...] = ()


@attrs.define(eq=False)
class Steps(Generic[T]):
    """Several jobs in a row, each of which names the next one, without a return to trio in between.

    They end early, after the running one, if they are interrupted, cancelled, or another job waits for the worker.
    """

    kind: SpanKind
    first_call: Callable[[], Step[T]]
    # Called in trio's thread after each step with its job, its result, and whether another follows (unless that is
    # prevented meanwhile). Must not wait. What it raises ends the steps; `Worker.run_steps` raises it.
    on_step: Callable[[Job[Step[T]], T, bool], None]
    session: int | None = None
    num_tokens: int = 0  # as in `Job`, of the first step; likewise the shares, and what counts
    round: int | None = None  # may be changed for the steps that follow
    shares: tuple[Share, ...] = ()
    count: Callable[[Step[T]], int] | None = None
    # Set in trio's thread and read in the worker's. Seeing it late costs time and nothing else.
    is_interrupted: bool = attrs.field(default=False, init=False)
    _callback_error: outcome.Error | None = attrs.field(default=None, init=False)

    def interrupt(self) -> None:
        """End the steps after the running one. Harmless once they are over."""
        self.is_interrupted = True

    def first(self) -> Job[Step[T]]:
        """The first step, as a job."""
        return Job(self.kind, self.first_call, self.session, self.num_tokens, self.round, self.count, self.shares)

    def following(self, step: Step[T]) -> Job[Step[T]] | None:
        """The step after one that was done; None if there is none or the steps are interrupted."""
        if step.next_call is None or self.is_interrupted:
            return None
        if len(step.shares) == 1:
            (share,) = step.shares
            return Job(self.kind, step.next_call, share.session, step.num_tokens, share.round)
        return Job(self.kind, step.next_call, self.session, step.num_tokens, self.round, shares=step.shares)

    def hand_over(self, job: Job[Step[T]], result: T, goes_on: bool) -> outcome.Outcome[None]:
        """Call `on_step`, unless an earlier call raised. Returns: the error of the first call that raised, if any."""
        if self._callback_error is not None:
            return self._callback_error
        called = outcome.capture(self.on_step, job, result, goes_on)
        if isinstance(called, outcome.Error):
            self._callback_error = called
            self.interrupt()
        return called


class JobError(OutriderError):
    """A job raised, or was not run because its worker has ended; the error is the cause."""


class Worker(Protocol):
    """Runs jobs one at a time, in the order in which they were handed in."""

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs jobs."""

    @property
    def is_hanging(self) -> bool:
        """Whether the running job takes very much longer than it should. May be read in any thread."""

    @property
    def overdue_s(self) -> float:
        """Seconds by which the running job exceeds a multiple of what it should take; -inf if it may take any time."""

    def watch(self) -> None:
        """Give up the worker if its running job hangs and that is allowed: another task waits for its end."""

    async def run(self, job: Job[T]) -> T:
        """Run a job and return its result.

        Cancellation: a job that has not begun is taken back. The end of one that has begun is waited for, its result is
            returned, and the cancellation is raised at the caller's next checkpoint. (A worker that may be given up
            does not wait for a job that hangs.)
        Raises: JobError: the job raised, or the worker has died or was given up; the error is the cause.
        """

    async def run_steps(self, steps: Steps[Any], *, meanwhile: Callable[[], None] | None = None) -> None:
        """Run steps until one is the last, or they are interrupted.

        Args:
            meanwhile: called in trio's thread once the steps are handed over; must neither wait nor raise.

        Cancellation: as in `run`; if steps have begun, the running one is the last.
        Raises: JobError: a step raised; the results of the steps before it were handed over. Also what `Steps.on_step`
            raises.
        """

    def clock(self) -> float:
        """Seconds on the clock of this worker's spans."""

    @property
    def busy_seconds(self) -> float:
        """Seconds spent on jobs so far."""


def as_job_error(job: Job[Any], result: outcome.Outcome[Any]) -> outcome.Outcome[Any]:
    """A job's outcome with any exception wrapped in a `JobError`."""
    return outcome.Error(job_error(job, result.error)) if isinstance(result, outcome.Error) else result


def job_error(job: Job[Any], error: BaseException) -> JobError:
    """The error of a job, with what its call raised as the cause."""
    # A user may keep the error for long, and the frames that it passed through may hold arrays.
    traceback.clear_frames(error.__traceback__)
    wrapped = JobError(f"{job.kind} failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
