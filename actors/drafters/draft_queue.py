"""The draft queue: sessions that want to draft share the draft model's passes.

Each step drafts one token for each session that takes part, in one forward pass. A session takes part until its draft
budget is spent; then its task asks the policy again. When another session wants to draft, the steps end after the
running one, and begin anew with all who want to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import attrs
import mlx.core as mx
import outcome
import trio

from actors.drafters.draft_steps import (
    CannotLookAhead,
    Drafted,
    DraftSteps,
    FollowingStep,
    LazyGuesses,
    RewoundToCheckpoint,
    StepOutcome,
)
from actors.model import CacheLostError, Feed, Model, feed_each
from actors.workers.shared_jobs import SharedJobEntry, SharedJobQueue
from actors.workers.worker import Job, JobError, Step, Steps, Worker
from protocol.trace import Share

# How often the event loop goes round before steps begin: tasks that have just heard of a step's results, or of a
# verdict, come back within that time.
ROUNDS_TO_GATHER = 3


@attrs.frozen
class StepResult:
    """What a step brought for one session.

    Attributes:
        request: the session's part.
        outcome: of the step, or the error that concerns this session alone.
        continues: whether it takes part in the next step, if there is one.
    """

    request: DraftRequest
    outcome: outcome.Outcome[StepOutcome]
    continues: bool


StepResults = list[StepResult]


@attrs.define(eq=False)
class DraftRequest(SharedJobEntry[None]):
    """One session's part in shared draft steps.

    Attributes:
        draft_steps: of the session.
        step: the next step. Read and written on the worker's thread once the steps have begun.
        on_step: called in trio's thread after each step, as `Steps.on_step`, and with whether the session is the first
            of those that shared it; must not wait.
        session, round: for the trace.
        alone: whether no other session may share its steps.
        is_interrupted: whether it ends after the running step. May be set in trio's thread at any time.
    """

    draft_steps: DraftSteps
    step: FollowingStep
    on_step: Callable[[Job[Step[StepResults]], StepOutcome, bool, bool], None]
    session: int
    round: int
    alone: bool = False
    is_interrupted: bool = attrs.field(default=False, init=False)

    def interrupt(self) -> None:
        """End the session's part after the running step. Harmless once it is over."""
        self.is_interrupted = True

    @property
    def share(self) -> Share:
        """Its part in the next step."""
        return Share(self.session, self.round, len(self.step.plan.feed))


class DraftQueue(SharedJobQueue[DraftRequest]):
    """The draft steps that sessions want, of one draft model."""

    def __init__(self, model: Model, worker: Worker, max_batch: int) -> None:
        """Make an empty queue.

        Args:
            model: lives on the worker's thread.
            worker: runs the steps.
            max_batch: most sessions in one step, >= 1.
        """
        super().__init__(max_batch)
        self._model = model
        self._worker = worker
        self._running: Steps[StepResults] | None = None
        self._leader: DraftRequest | None = None

    async def run(self, request: DraftRequest) -> None:
        """Run a session's draft steps, until its budget is spent, it is interrupted, or others want to join.

        Cancellation: steps that have not begun are taken back; otherwise the running step is the session's last.

        Raises:
            SharedJobError: a step failed, and others shared it.
            CacheLostError: a step that the session shared has failed since the request was made.
            JobError: a step failed, or the worker has died; the error is the cause.
            Whatever concerns this session alone, such as `NotANumberError`.
        """
        self._add(request)
        if self._running is not None:
            self._running.interrupt()
        await self._until_over(request)
        request.result()

    async def _lead(self, leader: DraftRequest) -> None:
        """Run the steps of those that wait."""
        self._leader = leader
        taken: list[DraftRequest] = []
        try:
            for _ in range(ROUNDS_TO_GATHER):
                await trio.lowlevel.checkpoint()
            taken = self._take()
            self._running = Steps(
                "draft",
                partial(self._step, taken),
                self._on_step,
                taken[0].session if len(taken) == 1 else None,
                sum(request.share.num_tokens for request in taken),
                taken[0].round if len(taken) == 1 else None,
                tuple(request.share for request in taken) if len(taken) > 1 else (),
            )
            await self._worker.run_steps(self._running)
        except JobError as error:
            for request, failure in zip(taken, self._failures(error, [True] * len(taken)), strict=True):
                request.end(outcome.Error(failure))
        finally:
            self._running, self._leader = None, None
            for request in taken:
                request.end(outcome.Value(None))

    def _interrupt(self, entry: DraftRequest) -> None:
        entry.interrupt()
        self._worker.watch()

    def _take(self) -> list[DraftRequest]:
        """The next steps' sessions: those that wait, in order, or the first one if it goes alone."""
        together = [request for request in self._waiting if not request.alone][: self._most]
        taken = self._waiting[:1] if self._waiting[0].alone else together
        self._waiting = [request for request in self._waiting if request not in taken]
        return taken

    def _on_step(self, job: Job[Step[StepResults]], results: StepResults, goes_on: bool) -> None:
        is_first = True
        for result in results:
            if isinstance(result.outcome, outcome.Error):
                result.request.end(result.outcome)
                continue
            continues = goes_on and result.continues
            heard = outcome.capture(result.request.on_step, job, result.outcome.unwrap(), continues, is_first)
            is_first = False
            if isinstance(heard, outcome.Error):
                # The session's own decisions have failed, which is no matter of the others.
                result.request.interrupt()
                result.request.end(heard)
            elif not continues:
                result.request.end(heard)
        # The leader's task may have something else to do now, such as to draft after another node.
        if goes_on and self._leader is not None and self._leader.is_over and self._running is not None:
            self._running.interrupt()

    # --- on the worker's thread -------------------------------------------------------------------

    def _step(self, requests: Sequence[DraftRequest]) -> Step[StepResults]:
        """Draft one token for each session."""
        prepared = {request: outcome.capture(_prepare, request) for request in requests}
        lazies = self._guesses(
            [each for each, found in prepared.items() if isinstance(found, outcome.Value) and found.value is None]
        )
        results: StepResults = []
        for request, hindrance in prepared.items():
            if request not in lazies:
                results.append(StepResult(request, cast("outcome.Outcome[StepOutcome]", hindrance), False))
                continue
            concluded = outcome.capture(_conclude, request, lazies[request])
            if isinstance(concluded, outcome.Error):
                results.append(StepResult(request, concluded, False))
                continue
            drafted, following = concluded.unwrap()
            continues = following is not None and not request.is_interrupted
            request.step = following or request.step
            results.append(StepResult(request, outcome.Value(drafted), continues))
        going_on = [result.request for result in results if result.continues]
        if not going_on:
            return Step(results)
        shares = tuple(request.share for request in going_on)
        num_tokens = sum(share.num_tokens for share in shares)
        return Step(results, partial(self._step, going_on), num_tokens, shares)

    def _guesses(self, requests: Sequence[DraftRequest]) -> dict[DraftRequest, outcome.Outcome[LazyGuesses]]:
        """Feed the sessions in one pass, and evaluate their guesses."""
        if not requests:
            return {}
        try:
            feeds = [
                Feed(request.draft_steps.sequence, request.step.plan.feed, 1, request.alone) for request in requests
            ]
            logits = self._model.feed_together(feeds) if self._can_share(len(feeds)) else feed_each(feeds)
            if any(request.draft_steps.shared.logits_pipeline.runs_user_code for request in requests):
                # User code is called with evaluated arrays, and must not be blamed for a pass that fails.
                mx.eval(logits)
            lazies: dict[DraftRequest, outcome.Outcome[LazyGuesses]] = {
                request: outcome.capture(_guess, request, rows) for request, rows in zip(requests, logits, strict=True)
            }
            mx.eval([lazy.value.arrays() for lazy in lazies.values() if isinstance(lazy, outcome.Value)])
        except BaseException:
            # What is in the caches now is not known. Nobody has seen what was drawn from these logits, if anything was:
            # when the sessions draw again, it is as if for the first time.
            self._model.abandon_shared()
            for request in requests:
                request.draft_steps.sequence.forget()
            raise
        return lazies

    def _can_share(self, num_texts: int) -> bool:
        if num_texts > 1 and self.num_shared > 1 and self._model.sharing_obstacle(rewinds_passes=True) is not None:
            self.num_shared = 1
        return self.num_shared > 1


def _prepare(request: DraftRequest) -> RewoundToCheckpoint | CannotLookAhead | None:
    return request.draft_steps.prepare(request.step.plan)


def _guess(request: DraftRequest, rows: mx.array) -> LazyGuesses:
    step = request.step
    return request.draft_steps.guess(rows, step.plan.keep + len(step.plan.feed), step.trail, step.history)


def _conclude(request: DraftRequest, lazy: outcome.Outcome[LazyGuesses]) -> tuple[Drafted, FollowingStep | None]:
    step = request.step
    return request.draft_steps.conclude(step.plan, lazy.unwrap(), step.trail, step.history, step.draft_budget)


@contextmanager
def lost_cache_read_again() -> Iterator[None]:
    """Ignore that a cache was lost, in a shared step that failed: the text is read again before the next step."""
    try:
        yield
    except JobError as error:
        if not isinstance(error.__cause__, CacheLostError):
            raise


def num_rows(job: Job[Any]) -> int:
    """Rows that a step computes: of each session as many as of the widest, because the others are padded."""
    return len(job.shares) * max(share.num_tokens for share in job.shares) if job.shares else job.num_tokens
