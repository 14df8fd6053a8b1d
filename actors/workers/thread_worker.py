"""A worker that owns an operating-system thread, to which trio tasks hand jobs, from load to shutdown of a model."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import attrs
import outcome
import trio

from actors.workers.core_sharing import CORES
from actors.workers.thread_pool import run_on_thread
from actors.workers.worker import Job, JobError, Steps, as_job_error
from protocol.errors import OutriderError
from protocol.trace import ActorName, Event, Span

logger = logging.getLogger("outrider")

T = TypeVar("T")

# A job counts as hanging after HANG_TIMEOUT_S, or what its worker was given instead, plus HANG_FACTOR times as long as
# the worker's longest job took, or as the job's tokens take at the slowest pace so far, whichever is more. Loading has
# no limit. A job is given up only if somebody waits for the worker, or for the job to end after its cancellation.
HANG_TIMEOUT_S = 10.0
HANG_FACTOR = 4.0
WATCH_INTERVAL_S = 0.05  # the shortest pause between two looks at such a job


@attrs.define(eq=False)
class _QueuedJob:
    job: Job[Any]  # or the first of `steps`
    task: trio.lowlevel.Task  # waits for it
    steps: Steps[Any] | None = None
    # Guards the one decision that two threads take: has the job begun, or was it taken back first?
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    has_begun: bool = False
    is_taken_back: bool = False


class HangError(OutriderError):
    """A job did not end in time, and nobody waits for it any more."""


class ThreadWorker:
    """A worker with a thread of its own, as an async context manager, to be left when nobody waits for a job any more.

    Leaving it, even if cancelled or interrupted, waits for the running job and gives the thread back to the pool.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(
        self,
        actor: ActorName,
        on_event: Callable[[Event], None] | None = None,
        *,
        may_be_given_up: bool = False,
        hang_timeout_s: float | None = None,
        explain: Callable[[BaseException], BaseException] | None = None,
    ) -> None:
        """Make a worker that is not started yet. `on_event` is called in trio's thread with the span of each finished
        job. `explain` gives, on the worker's thread, the reason behind an exception that a job raised.

        If it `may_be_given_up`, a job that hangs is given up when it was cancelled, when another job waits behind it,
        or when the worker is left. The worker then runs no more jobs, and its thread is abandoned. `hang_timeout_s`
        comes on top of the time that a job should take; None for `HANG_TIMEOUT_S`.
        """
        self._actor = actor
        self._on_event = on_event
        self._may_be_given_up = may_be_given_up
        self._base_timeout_s = HANG_TIMEOUT_S if hang_timeout_s is None else hang_timeout_s
        self._explain = explain
        self._jobs: queue.SimpleQueue[_QueuedJob | None] = queue.SimpleQueue()
        self.busy_seconds = 0.0
        self._longest_job_s = self._longest_token_s = 0.0
        # Written on the thread alone.
        self._running: Job[Any] | None = None
        self._job_began: float | None = None
        self._is_watched = False
        self._unfinished: set[_QueuedJob] = set()
        self._death: BaseException | None = None
        self._stopped = trio.Event()

    async def __aenter__(self) -> ThreadWorker:
        self._trio_token = trio.lowlevel.current_trio_token()
        self._thread = run_on_thread(f"outrider-{self._actor}", self._run_jobs, self._announce_end)
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
        return not self._stopped.is_set()

    async def run(self, job: Job[T]) -> T:
        result: T = await self._enqueue(_QueuedJob(job, trio.lowlevel.current_task()))
        return result

    async def run_steps(self, steps: Steps[Any], *, meanwhile: Callable[[], None] | None = None) -> None:
        await self._enqueue(_QueuedJob(steps.first(), trio.lowlevel.current_task(), steps), meanwhile)

    async def _enqueue(self, queued: _QueuedJob, meanwhile: Callable[[], None] | None = None) -> Any:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._stopped.is_set():
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise self._death_error(queued.job)
        self._unfinished.add(queued)
        self._jobs.put(queued)
        if self._job_began is not None:
            self.watch()
        if meanwhile is not None:
            meanwhile()

        def take_back(_: Callable[[], BaseException]) -> trio.lowlevel.Abort:
            with queued.lock:
                if queued.has_begun:
                    if queued.steps is not None:
                        queued.steps.interrupt()
                    self.watch()
                    return trio.lowlevel.Abort.FAILED
                queued.is_taken_back = True
                self._unfinished.discard(queued)
                return trio.lowlevel.Abort.SUCCEEDED

        return await trio.lowlevel.wait_task_rescheduled(take_back)

    # --- a job that hangs -------------------------------------------------------------------------

    @property
    def is_hanging(self) -> bool:
        return self.overdue_s > self._base_timeout_s

    @property
    def overdue_s(self) -> float:
        began, expected_s = self._job_began, self._hang_timeout_s - self._base_timeout_s
        return -math.inf if began is None else self.clock() - began - expected_s

    @property
    def _hang_timeout_s(self) -> float:
        job = self._running
        if not self._may_be_given_up or (job is not None and job.kind == "load"):
            return math.inf
        num_tokens = 0 if job is None else job.num_tokens
        return self._base_timeout_s + HANG_FACTOR * max(self._longest_job_s, num_tokens * self._longest_token_s)

    def watch(self) -> None:
        if self._may_be_given_up and not self._is_watched:
            self._is_watched = True
            trio.lowlevel.spawn_system_task(self._give_up_if_it_hangs)

    async def _give_up_if_it_hangs(self) -> None:
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
        seconds = 0.0 if self._job_began is None else self.clock() - self._job_began
        logger.warning(
            "the %s model hangs: a job has been running for %.0f s. Its thread is abandoned as a daemon, and the model "
            "is not used any more",
            self._actor,
            seconds,
        )
        self.give_up(HangError(f"a job had not ended after {seconds:.0f} s"))

    def give_up(self, reason: OutriderError) -> None:
        """Abandon the thread, and fail all tasks that wait for its jobs. Harmless once the worker has ended."""
        if not self._stopped.is_set():
            self._jobs.put(None)
            self._thread.abandon()
            self._end(reason)

    # --- on the thread ----------------------------------------------------------------------------

    def _run_jobs(self) -> None:
        # On MLX's default device. No `mx.stream` is entered for another: that writes the one default of the process,
        # which the other model and the user's own code have, too.
        while (queued := self._jobs.get()) is not None:
            with queued.lock:
                if queued.is_taken_back:
                    continue
                queued.has_begun = True
            following: Job[Any] | None = queued.job
            while following is not None:
                following = self._run_one(queued, following)
            # Hold no result, and with it no array, while waiting for the next job.
            del queued

    def _run_one(self, queued: _QueuedJob, job: Job[Any]) -> Job[Any] | None:
        """Run a job, or one step. Returns: the step that follows it."""
        began = time.perf_counter()
        self._running, self._job_began = job, began
        # A short job that runs no model would leave the other model with a part of the cores for a whole pass.
        with nullcontext() if job.kind in ("open", "close", "save") else CORES.computing():
            result = job.run()
        if self._explain is not None and isinstance(result, outcome.Error):
            result = outcome.Error(self._explain(result.error))
        ended = time.perf_counter()
        self._running = self._job_began = None
        following = None
        if queued.steps is not None and isinstance(result, outcome.Value):
            # A task that waits for the worker comes first: sessions take turns after each step.
            following = queued.steps.following(result.value) if self._jobs.empty() else None
            # The next call stays on this thread.
            result = outcome.Value(result.value.result)
        self._trio_token.run_sync_soon(self._finish, queued, job, result, began, ended, following is not None)
        return following

    def _announce_end(self, result: outcome.Outcome[None]) -> None:
        # Whatever ends the thread, the tasks that wait for it are told.
        try:
            self._trio_token.run_sync_soon(self._end, result.error if isinstance(result, outcome.Error) else None)
        except trio.RunFinishedError:
            return  # the worker was given up, and trio has ended since

    # --- back in trio -----------------------------------------------------------------------------

    def _finish(
        self, queued: _QueuedJob, job: Job[Any], result: outcome.Outcome[Any], began: float, ended: float, goes_on: bool
    ) -> None:
        if queued not in self._unfinished:
            return  # given up
        steps = queued.steps
        job.began, job.ended, seconds = began, ended, ended - began
        self.busy_seconds += seconds
        if job.kind != "load":
            self._longest_job_s = max(self._longest_job_s, seconds)
        if job.num_tokens > 0:
            self._longest_token_s = max(self._longest_token_s, seconds / job.num_tokens)
        if self._on_event is not None:
            round = job.round if steps is None else steps.round
            span = Span(self._actor, job.kind, job.session, began, ended, job.num_tokens, round, job.shares)
            self._on_event(span)
        if not isinstance(result, outcome.Value):
            result = as_job_error(job, result)
        elif steps is not None:
            result = steps.hand_over(job, result.value, goes_on)
        if not goes_on:
            self._unfinished.discard(queued)
            trio.lowlevel.reschedule(queued.task, result)

    def _end(self, death: BaseException | None) -> None:
        if self._stopped.is_set():
            return  # given up before
        self._death = death
        # Also in the end of a thread that was left: what was handed in since waits behind its last job.
        while self._unfinished:
            queued = self._unfinished.pop()
            # If an abandoned thread comes back after all, it does nothing more for sessions that are over.
            with queued.lock:
                queued.is_taken_back = True
                if queued.steps is not None:
                    queued.steps.interrupt()
            trio.lowlevel.reschedule(queued.task, outcome.Error(self._death_error(queued.job)))
        self._stopped.set()

    def _death_error(self, job: Job[Any]) -> JobError:
        why = "has ended" if self._death is None else f"has died of {self._death!r}"
        error = JobError(f"{job.kind} was not run: the {self._actor}'s thread {why}")
        error.__cause__ = self._death
        return error
