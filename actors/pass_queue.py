"""The pass queue: rounds of several sessions that wait for the target share its next forward pass.

While one pass runs, the rounds of other sessions become ready; what waits when the model is free makes the next pass.
So nobody waits for anybody else's drafter, and no round waits for more than the pass that runs and one job in between,
such as a chunk of a prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import attrs
import outcome
import trio

from actors.model import Model
from actors.target_jobs import Verified, VerifyRequest, verify
from actors.workers.worker import Job, JobError, Worker
from protocol.trace import Share

Outcomes = list[outcome.Outcome[Verified]]


class SharedPassError(JobError):
    """A pass of several rounds failed, and it is not known because of which."""


@attrs.frozen
class SharedPass:
    """A pass, as one of the rounds in it sees it.

    Attributes:
        verified: the round's own result.
        began, ended: of the pass, in seconds on the worker's clock.
        num_rounds: how many rounds shared it.
        num_tokens: tokens of all rounds that went through the model.
        is_first: whether this round is the first of those that shared it, so that each pass can be counted once.
    """

    verified: Verified
    began: float
    ended: float
    num_rounds: int
    num_tokens: int
    is_first: bool

    @property
    def seconds(self) -> float:
        """Duration of the pass."""
        return self.ended - self.began


@attrs.define(eq=False)
class _WaitingRound:
    """A round that waits for a pass.

    Attributes:
        request: its part in the pass.
        share: what the trace says of it.
        alone: whether it has a pass for itself.
        has_begun: whether a pass has taken it. Set on the worker's thread, under the queue's lock.
        result: the pass, or the error that ends the round.
    """

    request: VerifyRequest
    share: Share
    alone: bool
    has_begun: bool = False
    result: outcome.Outcome[SharedPass] | None = None
    _changed: trio.Event = attrs.field(factory=trio.Event)

    def wake(self) -> None:
        """Have its task look at the queue again."""
        self._changed.set()

    async def change(self) -> None:
        """Wait for a `wake` since the last call."""
        await self._changed.wait()
        self._changed = trio.Event()


class PassQueue:
    """The rounds that wait for a pass of one model.

    The task of one of the rounds leads: it hands the worker a job that takes what waits when it begins. When a pass is
    over, the task of a round that still waits leads the next one.
    """

    def __init__(self, model: Model, worker: Worker, max_batch: int) -> None:
        """Make an empty queue.

        Args:
            model: lives on the worker's thread.
            worker: runs the passes.
            max_batch: most rounds in one pass, >= 1.
        """
        self._model = model
        self._worker = worker
        self._max_batch = max_batch
        self._waiting: list[_WaitingRound] = []
        self._is_led = False
        # The worker's thread takes rounds while tasks add some and take them back.
        self._lock = threading.Lock()

    async def run(
        self, request: VerifyRequest, share: Share, *, meanwhile: Callable[[], None], alone: bool = False
    ) -> SharedPass:
        """Run a round in the next pass.

        Args:
            request: the round's part in the pass.
            share: names the session and the round in the trace.
            meanwhile: called in trio's thread once the round waits; must neither wait nor raise.
            alone: whether the round has a pass for itself.

        Cancellation: a round that no pass has taken is taken back. One that a pass has taken is not abandoned: the call
            waits for its end and returns its result.

        Raises:
            SharedPassError: the pass failed, and others shared it.
            JobError: the pass failed, or the worker has died; the error is the cause.
            Whatever concerns this round alone, such as `NotANumberError`.
        """
        round = _WaitingRound(request, share, alone)
        with self._lock:
            self._waiting.append(round)
        meanwhile()
        try:
            while round.result is None:
                await (self._wait(round) if self._is_led else self._lead())
        finally:
            self._take_back(round)
            if not self._is_led and self._waiting:
                self._waiting[0].wake()
        return round.result.unwrap()

    async def _wait(self, round: _WaitingRound) -> None:
        """Wait until the round is done, or its task has to lead."""
        try:
            await round.change()
        except trio.Cancelled:
            if self._take_back(round):
                raise
            with trio.CancelScope(shield=True):
                while round.result is None:
                    await round.change()

    def _take_back(self, round: _WaitingRound) -> bool:
        """Take back a round. Returns: whether no pass has taken it."""
        with self._lock:
            if round in self._waiting:
                self._waiting.remove(round)
            return not round.has_begun

    async def _lead(self) -> None:
        """Run one pass with what waits when it begins."""
        taken: list[_WaitingRound] = []
        job: Job[Outcomes] = Job("verify", partial(self._verify, taken), count=partial(_num_tokens, taken))
        job.prepare = partial(self._take, taken, job)
        self._is_led = True
        try:
            outcomes = await self._worker.run(job)
        except JobError as error:
            if not taken:
                raise
            outcomes = [_failed(error, len(taken)) for _ in taken]
        finally:
            self._is_led = False
        for index, (round, result) in enumerate(zip(taken, outcomes, strict=True)):
            shared = partial(
                SharedPass,
                began=job.began,
                ended=job.ended,
                num_rounds=len(taken),
                num_tokens=job.num_tokens,
                is_first=index == 0,
            )
            round.result = outcome.capture(_shared, shared, result)
            round.wake()

    # --- on the worker's thread -------------------------------------------------------------------

    def _take(self, taken: list[_WaitingRound], job: Job[Outcomes]) -> None:
        """Take what waits into a pass that begins."""
        with self._lock:
            # In order, so that nobody is passed over.
            for round in self._waiting[: self._max_batch]:
                if taken and (round.alone or taken[0].alone):
                    break
                round.has_begun = True
                taken.append(round)
            del self._waiting[: len(taken)]
        job.num_tokens = sum(round.share.num_tokens for round in taken)
        shares = tuple(round.share for round in taken)
        if len(shares) == 1:
            job.session, job.round = shares[0].session, shares[0].round
        else:
            job.shares = shares

    def _verify(self, taken: list[_WaitingRound]) -> Outcomes:
        return verify(self._model, [round.request for round in taken]) if taken else []


def _num_tokens(taken: list[_WaitingRound], results: Outcomes) -> int:
    """Tokens that went through the model. What the proposals of failed rounds did to it is not known."""
    widths = (result.value.width if isinstance(result, outcome.Value) else None for result in results)
    return sum(round.share.num_tokens if width is None else width for round, width in zip(taken, widths, strict=True))


def _failed(error: JobError, num_rounds: int) -> outcome.Error:
    if num_rounds > 1:
        shared = SharedPassError(*error.args)
        shared.__cause__ = error.__cause__
        error = shared
    return outcome.Error(error)


def _shared(make: Callable[[Verified], SharedPass], result: outcome.Outcome[Verified]) -> SharedPass:
    return make(result.unwrap())
