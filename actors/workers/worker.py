"""An owned operating-system thread, to which trio tasks hand jobs.

MLX's streams and random state belong to a thread, so a model lives on one thread from load to
shutdown. The threads themselves come from `actors.workers.thread_pool`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import attrs
import mlx.core as mx
import outcome
import trio

from actors.workers.thread_pool import run_on_thread
from protocol.errors import OutriderError
from protocol.trace import Actor, Event, Span, SpanKind

logger = logging.getLogger("outrider")

T = TypeVar("T")

# A job is taken to hang once it has run for so many seconds, and SLOWEST times as long as the slowest that its worker
# has done would have taken for as many tokens. Loading takes as long as it takes. Only workers whose loss can be borne
# give up a job, and only where somebody waits for the worker, or for the job to end after its cancellation.
HANG_TIMEOUT_S = 10.0
SLOWEST = 4.0
# Seconds after which a job that may be given up is looked at again, at least.
WATCH_INTERVAL_S = 0.05


@attrs.define(eq=False)
class Job(Generic[T]):
    """Something for a worker to do.

    Attributes:
        kind: what it is, for traces and for simulated prices.
        call: does it, on the worker's thread. What it returns crosses threads, so it holds ints and
            evaluated arrays only.
        session: which session it is for, or None.
        num_tokens: tokens that go through the model. Once the job is done, what `count` says, where there is one.
        round: which round of the session it is for, or None.
        count: how many tokens went through the model, told from the result; None where that is known beforehand.
        began, ended: seconds on the worker's clock, once it is done.
    """

    kind: SpanKind
    call: Callable[[], T]
    session: int | None = None
    num_tokens: int = 0
    round: int | None = None
    count: Callable[[T], int] | None = None
    began: float = attrs.field(default=0.0, init=False)
    ended: float = attrs.field(default=0.0, init=False)

    @property
    def seconds(self) -> float:
        """How long it took, once it is done."""
        return self.ended - self.began

    def run(self) -> outcome.Outcome[T]:
        """Do it, and see how many tokens went through the model."""
        result = outcome.capture(self.call)
        if self.count is not None and isinstance(result, outcome.Value):
            self.num_tokens = self.count(result.value)
        return result


@attrs.frozen
class Step(Generic[T]):
    """What one of several steps returns.

    Attributes:
        result: crosses threads, as a job's does.
        then: does the next step; None where there is none.
        num_tokens: tokens that go through the model in that.
    """

    result: T
    then: Callable[[], Step[T]] | None = None
    num_tokens: int = 1


@attrs.define(eq=False)
class Steps(Generic[T]):
    """Several jobs in a row, each of which says what the next one is, done without a way through trio between them.

    They end early, after the one that is running, when they are interrupted, when the call that waits for them is
    cancelled, and when another job waits for the worker.

    Attributes:
        kind, session, num_tokens, round: as a job's; the number is that of the first step. The round may be set
            anew, for the steps that follow.
        begin: does the first step, on the worker's thread.
        on_step: called in trio's thread with each step, once it is done: the job that it was, its result, and whether
            another follows, unless that is prevented meanwhile. Must not wait. What it raises ends the steps, and
            comes out of `Worker.run_steps`.
        is_interrupted: whether they end after the step that is running.
    """

    kind: SpanKind
    begin: Callable[[], Step[T]]
    on_step: Callable[[Job[Step[T]], T, bool], None]
    session: int | None = None
    num_tokens: int = 0
    round: int | None = None
    # Set in trio's thread and read on the worker's. Nothing hangs on when it is seen but the time.
    is_interrupted: bool = attrs.field(default=False, init=False)
    _trouble: outcome.Error | None = attrs.field(default=None, init=False)

    def interrupt(self) -> None:
        """End them after the step that is running; harmless where they are over."""
        self.is_interrupted = True

    def first(self) -> Job[Step[T]]:
        """The first step, as a job."""
        return Job(self.kind, self.begin, self.session, self.num_tokens, self.round)

    def following(self, step: Step[T]) -> Job[Step[T]] | None:
        """What comes after a step that was done, as a job."""
        if step.then is None or self.is_interrupted:
            return None
        return Job(self.kind, step.then, self.session, step.num_tokens, self.round)

    def hand_over(self, job: Job[Step[T]], result: T, goes_on: bool) -> outcome.Outcome[None]:
        """Have a step heard of; returns what has come of that so far."""
        if self._trouble is not None:
            return self._trouble
        heard = outcome.capture(self.on_step, job, result, goes_on)
        if isinstance(heard, outcome.Error):
            self._trouble = heard
            self.interrupt()
        return heard


class JobError(OutriderError):
    """A job raised, or was not done because its worker has ended; the error is the cause."""


class Worker(Protocol):
    """Does jobs, one at a time, in the order in which they were handed in."""

    @property
    def is_alive(self) -> bool:
        """Whether it does jobs."""
        ...

    @property
    def is_hanging(self) -> bool:
        """Whether the job that is running takes very much longer than it should; may be asked in any thread."""
        ...

    async def run(self, job: Job[T], *, meanwhile: Callable[[], None] | None = None) -> T:
        """Do a job and return its result.

        Args:
            job: what to do.
            meanwhile: called, in trio's thread, once the job is handed over; must neither wait nor raise.

        Cancellation: a job that has not begun is taken back. One that has begun is not abandoned:
        the call waits for its end and returns its result, and the cancellation strikes at the caller's
        next checkpoint. (A worker that may be given up does not wait for a job that hangs.)

        Raises: JobError: the job raised; or the worker has died, of the cause, or was given up.
        """
        ...

    async def run_steps(self, steps: Steps[Any]) -> None:
        """Do steps until one says that it was the last, or they are interrupted.

        Cancellation: as `run`; of steps that have begun, the one that is running is the last.

        Raises: JobError: a step raised; what those before it brought was handed over. And what `Steps.on_step` raises.
        """
        ...

    def clock(self) -> float:
        """Seconds on the clock by which this worker's spans are timed."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Time spent on jobs so far."""
        ...


@attrs.define(eq=False)
class _Waiting:
    """A job in the queue, or the first of several steps, and the task that waits for it."""

    job: Job[Any]
    task: trio.lowlevel.Task
    steps: Steps[Any] | None = None
    # Guards the one decision that two threads take: has the job begun, or was it taken back first?
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    begun: bool = False
    taken_back: bool = False


class HangError(OutriderError):
    """A job that nobody waits for any more did not end in time."""


class ThreadWorker:
    """A worker with a thread of its own.

    Use as an async context manager, and leave it when nobody waits for a job any more. Leaving it waits for the job
    that is running and gives the thread back to the pool, also under cancellation and when interrupted.
    """

    def __init__(
        self,
        actor: Actor,
        device: mx.Device | None = None,
        on_event: Callable[[Event], None] | None = None,
        *,
        may_be_given_up: bool = False,
    ) -> None:
        """A worker that is not started yet.

        Args:
            actor: whose it is; names the thread and the spans.
            device: where its jobs compute; None for MLX's default.
            on_event: called in trio's thread with the span of each finished job.
            may_be_given_up: whether a job that hangs is given up where it was cancelled, another job waits behind it,
                or the worker is left. The worker then does no jobs any more, and its thread is left to itself.
        """
        self._actor = actor
        self._device = device
        self._on_event = on_event
        self._may_be_given_up = may_be_given_up
        self._jobs: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._busy_seconds = 0.0
        self._longest_job_s = self._longest_token_s = 0.0
        # Written on the thread alone.
        self._running: Job[Any] | None = None
        self._job_began: float | None = None
        self._is_watched = False
        self._unfinished: set[_Waiting] = set()
        self._death: BaseException | None = None
        self._stopped = trio.Event()

    async def __aenter__(self) -> ThreadWorker:
        self._trio_token = trio.lowlevel.current_trio_token()
        self._thread = run_on_thread(f"outrider-{self._actor}", self._do_jobs, self._announce_end)
        return self

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(self, *_: object) -> None:
        self._jobs.put(None)
        interrupt: KeyboardInterrupt | None = None
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self._hang_timeout_s):
            # A Ctrl-C has to wait too: a thread that is at work when the interpreter exits may abort the process.
            while not self._stopped.is_set():
                try:
                    await self._stopped.wait()
                except KeyboardInterrupt as error:
                    interrupt = error
        if not self._stopped.is_set():
            self._give_up()
        if interrupt is not None:
            raise interrupt

    @property
    def is_alive(self) -> bool:
        """See `Worker.is_alive`."""
        return not self._stopped.is_set()

    @property
    def busy_seconds(self) -> float:
        """See `Worker.busy_seconds`."""
        return self._busy_seconds

    def clock(self) -> float:
        """Seconds, from an arbitrary moment on."""
        return time.perf_counter()

    async def run(self, job: Job[T], *, meanwhile: Callable[[], None] | None = None) -> T:
        """See `Worker.run`."""
        result: T = await self._done(_Waiting(job, trio.lowlevel.current_task()), meanwhile)
        return result

    async def run_steps(self, steps: Steps[Any]) -> None:
        """See `Worker.run_steps`."""
        await self._done(_Waiting(steps.first(), trio.lowlevel.current_task(), steps))

    async def _done(self, waiting: _Waiting, meanwhile: Callable[[], None] | None = None) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._stopped.is_set():
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise self._dead(waiting.job)
        self._unfinished.add(waiting)
        self._jobs.put(waiting)
        if self._job_began is not None:
            self._watch()
        if meanwhile is not None:
            meanwhile()

        def take_back(_: Callable[[], BaseException]) -> trio.lowlevel.Abort:
            with waiting.lock:
                if waiting.begun:
                    if waiting.steps is not None:
                        waiting.steps.interrupt()
                    self._watch()
                    return trio.lowlevel.Abort.FAILED
                waiting.taken_back = True
                self._unfinished.discard(waiting)
                return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(take_back)

    # --- a job that hangs -------------------------------------------------------------------------

    @property
    def is_hanging(self) -> bool:
        """See `Worker.is_hanging`."""
        began, timeout_s = self._job_began, self._hang_timeout_s
        return began is not None and self.clock() - began > timeout_s

    @property
    def _hang_timeout_s(self) -> float:
        job = self._running
        if not self._may_be_given_up or (job is not None and job.kind == "load"):
            return math.inf
        num_tokens = 0 if job is None else job.num_tokens
        return HANG_TIMEOUT_S + SLOWEST * max(self._longest_job_s, num_tokens * self._longest_token_s)

    def _watch(self) -> None:
        """See to it that the job that is running is given up if it hangs."""
        if self._may_be_given_up and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(self._give_up_if_it_hangs)

    async def _give_up_if_it_hangs(self) -> None:
        """Look at the job that is running, and at those after it, until nobody waits for any."""
        while self._unfinished and not self._stopped.is_set():
            began = self._job_began
            left_s = self._hang_timeout_s - (0.0 if began is None else self.clock() - began)
            if began is not None and left_s <= 0.0:
                self._give_up()
                break
            with trio.move_on_after(max(left_s, WATCH_INTERVAL_S)):
                await self._stopped.wait()
        self._is_watched = False

    def _give_up(self) -> None:
        """Leave the thread to itself, and whoever waits for one of its jobs, too."""
        began = self._job_began
        seconds = 0.0 if began is None else self.clock() - began
        logger.warning(
            "the %s model hangs: a job has been running for %.0f s. Its thread is left to itself, as a daemon, and "
            "nothing is asked of the model any more",
            self._actor,
            seconds,
        )
        self._jobs.put(None)
        self._thread.leave_to_itself()
        self._end(HangError(f"a job had not ended after {seconds:.0f} s"))

    # --- on the thread ----------------------------------------------------------------------------

    def _do_jobs(self) -> None:
        with mx.stream(self._device or mx.default_device()):
            while (waiting := self._jobs.get()) is not None:
                with waiting.lock:
                    if waiting.taken_back:
                        continue
                    waiting.begun = True
                following: Job[Any] | None = waiting.job
                while following is not None:
                    following = self._do(waiting, following)
                # Hold no result, and with it no array, while waiting for the next job.
                del waiting

    def _do(self, waiting: _Waiting, job: Job[Any]) -> Job[Any] | None:
        """Do a job, or a step; returns the step that follows it."""
        began = time.perf_counter()
        self._running, self._job_began = job, began
        result = job.run()
        ended = time.perf_counter()
        self._running = self._job_began = None
        following = None
        if waiting.steps is not None and isinstance(result, outcome.Value):
            # Whoever waits for the worker comes first: sessions have their turns after each step.
            following = waiting.steps.following(result.value) if self._jobs.empty() else None
            # What follows stays on this thread.
            result = outcome.Value(result.value.result)
        self._trio_token.run_sync_soon(self._finish, waiting, job, result, began, ended, following is not None)
        return following

    def _announce_end(self, result: outcome.Outcome[None]) -> None:
        # Whatever ends it, those who wait for it hear of that.
        try:
            self._trio_token.run_sync_soon(self._end, result.error if isinstance(result, outcome.Error) else None)
        except trio.RunFinishedError:
            return  # it had been given up, and nobody is there to hear of it

    # --- back in trio -----------------------------------------------------------------------------

    def _finish(
        self,
        waiting: _Waiting,
        job: Job[Any],
        result: outcome.Outcome[Any],
        began: float,
        ended: float,
        goes_on: bool,
    ) -> None:
        if waiting not in self._unfinished:
            return  # given up
        steps = waiting.steps
        job.began, job.ended = began, ended
        self._busy_seconds += job.seconds
        if job.kind != "load":
            self._longest_job_s = max(self._longest_job_s, job.seconds)
        if job.num_tokens > 0:
            self._longest_token_s = max(self._longest_token_s, job.seconds / job.num_tokens)
        if self._on_event is not None:
            round = job.round if steps is None else steps.round
            self._on_event(Span(self._actor, job.kind, job.session, began, ended, job.num_tokens, round))
        result = as_job_error(job, result)
        if steps is not None and isinstance(result, outcome.Value):
            result = steps.hand_over(job, result.value, goes_on)
        if not goes_on:
            self._unfinished.discard(waiting)
            trio.lowlevel.reschedule(waiting.task, result)

    def _end(self, death: BaseException | None) -> None:
        if self._stopped.is_set():
            return  # given up before
        self._death = death
        while self._unfinished and death is not None:
            waiting = self._unfinished.pop()
            # Where the thread comes back after all, it does nothing more for sessions that are over.
            with waiting.lock:
                waiting.taken_back = True
                if waiting.steps is not None:
                    waiting.steps.interrupt()
            trio.lowlevel.reschedule(waiting.task, outcome.Error(self._dead(waiting.job)))
        self._stopped.set()

    def _dead(self, job: Job[Any]) -> JobError:
        why = "has ended" if self._death is None else f"has died of {self._death!r}"
        error = JobError(f"{job.kind} is not done: the {self._actor}'s thread {why}")
        error.__cause__ = self._death
        return error


def as_job_error(job: Job[Any], result: outcome.Outcome[Any]) -> outcome.Outcome[Any]:
    """A job's outcome with any exception wrapped, so that callers can tell it from their own."""
    if not isinstance(result, outcome.Error):
        return result
    # The error may live for long, as the cause of what a user is told. The arrays in the frames that it came through,
    # which may be what there was no room for, must not live as long.
    traceback.clear_frames(result.error.__traceback__)
    error = JobError(f"{job.kind} failed: {type(result.error).__name__}: {result.error}")
    error.__cause__ = result.error
    return outcome.Error(error)
