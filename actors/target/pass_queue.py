"""The pass queue: rounds of several sessions that wait for the target share its next forward pass.

While one pass runs, the rounds of other sessions become ready. Which of them make the next pass, with how many of their
drafted tokens, is decided when the model is free for it (`protocol.pass_plan`). No round waits for more than the pass
that runs, one that leaves it out, and one job in between, such as a chunk of a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from functools import partial

import attrs
import outcome
import trio

from actors.model import CacheLostError, Model
from actors.target.verify import Verified, VerifyRequest, verify
from actors.workers.shared_jobs import SharedJobEntry, SharedJobQueue
from actors.workers.worker import Job, JobError, Worker, as_job_error
from protocol.pass_plan import PassPlan, ReadyRound, plan_pass
from protocol.prices import Mean, Prices
from protocol.target_queue import TargetQueue
from protocol.trace import Share

Outcomes = list[outcome.Outcome[Verified]]

# Longest wait for rounds that are about to be ready, and how much longer than expected each is waited for: in units of
# a pass of one row.
MAX_WAIT, PATIENCE = 1.0, 0.02
# Every so many passes of texts without drafts, one is not started ahead, so that it shows what such a pass costs.
MEASURED_EVERY = 32
# Checkpoints within which the task of a round that was in a pass has told the drafter of its verdict.
CHECKPOINTS_TO_END_ROUND = 3
# Checkpoints for each session that is asked to hurry, until all have their rounds: mailboxes are emptied one message at
# a time.
CHECKPOINTS_TO_HURRY = 10


@attrs.frozen
class SharedPass:
    """A pass, as one of the rounds in it sees it.

    Attributes:
        verified: the round's own result.
        began, ended: of the pass, in seconds on the worker's clock.
        num_rounds: how many rounds shared it.
        num_rows: rows of the pass: of each round as many as of the widest, because the others are padded.
        is_first: whether this round is the first of those that shared it, so that each pass can be counted once.
        is_typical: whether its duration shows what such a pass costs: not if a text shared a pass for the first time,
            since its cache is copied then, nor if it was started before the job for it began.
    """

    verified: Verified
    began: float
    ended: float
    num_rounds: int
    num_rows: int
    is_first: bool
    is_typical: bool

    @property
    def seconds(self) -> float:
        """Duration of the pass."""
        return self.ended - self.began


@attrs.define(eq=False)
class _WaitingRound(SharedJobEntry[SharedPass]):
    """A round that waits for a pass.

    Attributes:
        request: its part in the pass.
        ready: what the plan sees of it.
        share: what the trace says of its part in the pass that has taken it.
    """

    request: VerifyRequest
    ready: ReadyRound
    share: Share = attrs.field(init=False)

    @property
    def session(self) -> int:
        """Whose round it is."""
        return self.request.proposal.session

    @property
    def alone(self) -> bool:
        """Whether it has a pass for itself."""
        return self.request.alone

    def feed(self, num_drafted: int) -> None:
        """Leave out drafted tokens after the first `num_drafted`, if they may be left out."""
        if self.ready.reach:
            self.request = attrs.evolve(self.request, proposal=self.request.proposal.cut(num_drafted))
        proposal = self.request.proposal
        self.share = Share(proposal.session, proposal.round, self.ready.num_needed + num_drafted)


@attrs.define
class _Taken:
    """What the worker's thread takes into a pass.

    Attributes:
        rounds: that share it.
        goes_ahead: whether the next pass is started before this one's tokens are known here.
    """

    rounds: list[_WaitingRound] = attrs.field(factory=list)
    goes_ahead: bool = False


@attrs.define
class _Member:
    """A session that has had a round in a pass, and is expected to have another one.

    Attributes:
        ready: its last round.
        ended_s: when its last pass ended, in seconds on the worker's clock; None while it waits or has a pass.
        turnaround_s: from the end of a pass until its next round is ready.
        has_shared: whether it has shared a pass.
    """

    ready: ReadyRound
    ended_s: float | None = None
    turnaround_s: Mean = attrs.field(factory=lambda: Mean(memory=8.0))
    has_shared: bool = False

    @property
    def due_s(self) -> float:
        """When its next round should be ready, in seconds on the worker's clock; in the past if that is not known."""
        return -math.inf if self.ended_s is None else self.ended_s + self.turnaround_s.value


class PassQueue(SharedJobQueue[_WaitingRound]):
    """The rounds that wait for a pass of one model.

    A job takes what waits when it begins.
    """

    def __init__(
        self,
        model: Model,
        worker: Worker,
        prices: Prices,
        target_queue: TargetQueue,
        max_batch: int,
        *,
        can_hurry: Callable[[int], bool],
        hurry: Callable[[int], None],
    ) -> None:
        """Make an empty queue.

        Args:
            model: lives on the worker's thread.
            worker: runs the passes.
            prices: of the target.
            target_queue: is told which rounds wait and run.
            max_batch: most rounds in one pass, >= 1.
            can_hurry: whether a session that is drafted for could have its next round at once.
            hurry: asks a session to do so.
        """
        super().__init__(max_batch)
        self._model = model
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._can_hurry = can_hurry
        self._ask_to_hurry = hurry
        self._members: dict[int, _Member] = {}  # by session; changed under the lock
        self._num_ahead = 0  # passes in succession that were started ahead
        self._arrival = trio.Event()

    def forget(self, session: int) -> None:
        """Expect no further round of a session."""
        with self._lock:
            member = self._members.pop(session, None)
        if member is not None:
            self._arrival.set()

    async def run(self, request: VerifyRequest, ready: ReadyRound, *, meanwhile: Callable[[], None]) -> SharedPass:
        """Run a round in the next pass.

        Args:
            request: the round's part in the pass.
            ready: how much it feeds, and what that is worth.
            meanwhile: called in trio's thread once the round waits; must neither wait nor raise.

        Cancellation: a round that no pass has taken is taken back. One that a pass has taken is not abandoned: the call
            waits for its end and returns its result.

        Raises:
            SharedJobError: the pass failed, and others shared it. The suspects are the rounds that had drafted tokens;
                all if none had any.
            JobError: the pass failed, or the worker has died; the error is the cause.
            Whatever concerns this round alone, such as `NotANumberError`.
        """
        round = _WaitingRound(request, ready)
        self._join(round.session, ready)
        self._target_queue.enter(round.session, ready.max_width)
        self._add(round)
        self._arrival.set()
        meanwhile()
        try:
            await self._until_over(round)
        finally:
            self._target_queue.leave(round.session, self._worker.clock())
        return round.result()

    def _join(self, session: int, ready: ReadyRound) -> None:
        with self._lock:
            member = self._members.setdefault(session, _Member(ready))
        if member.ended_s is not None:
            member.turnaround_s.observe(self._worker.clock() - member.ended_s)
        member.ready, member.ended_s = ready, None

    async def _lead(self, leader: _WaitingRound) -> None:
        """Run one pass with what waits when it begins."""
        taken, was_ahead = _Taken(), self._num_ahead > 0
        job: Job[Outcomes] = Job(
            "verify", partial(self._verify, taken), count=lambda results: sum(_widths(taken.rounds, results))
        )
        job.prepare = partial(self._take, taken, job)
        try:
            await self._wait_for_more()
            with self._lock:
                sessions = [round.session for round in self._chosen()]
            self._target_queue.begin(sessions, self._worker.clock())
            outcomes = await self._worker.run(job)
        except JobError as error:
            if not taken.rounds:
                raise
            fed_drafted = [round.request.feeds_drafted for round in taken.rounds]
            are_suspects = fed_drafted if any(fed_drafted) else [True] * len(fed_drafted)
            outcomes = list(map(outcome.Error, self._failures(error, are_suspects)))
        num_rounds = len(taken.rounds)
        num_rows = num_rounds * max(_widths(taken.rounds, outcomes), default=0)
        members = [self._members[round.session] for round in taken.rounds if round.session in self._members]
        is_typical = num_rounds == 1 or (not was_ahead and all(member.has_shared for member in members))
        for index, (round, result) in enumerate(zip(taken.rounds, outcomes, strict=True)):
            shared = partial(
                SharedPass,
                began=job.began,
                ended=job.ended,
                num_rounds=num_rounds,
                num_rows=num_rows,
                is_first=index == 0,
                is_typical=is_typical,
            )
            if isinstance(result, outcome.Error) and not isinstance(result.error, JobError | CacheLostError):
                result = as_job_error(job, result)
            round.end(outcome.capture(_shared, shared, result))
            # At once, for the task that leads the next pass may be the first to run.
            if (member := self._members.get(round.session)) is not None:
                member.ended_s = job.ended
                member.has_shared = member.has_shared or num_rounds > 1

    async def _wait_for_more(self) -> None:
        """Wait for rounds that are about to be ready, as long as the pass gains by it."""
        until_s = self._worker.clock() + MAX_WAIT * self._prices.verify(1)
        # The tasks of the last pass's other rounds, which have been woken at the same time, get as far as this one.
        for _ in range(CHECKPOINTS_TO_END_ROUND if len(self._members) > 1 else 0):
            await trio.lowlevel.checkpoint()
        while True:
            now_s = self._worker.clock()
            with self._lock:
                coming = self._coming(now_s)
                plan = self._plan(list(coming.values()), max_wait_s=until_s - now_s)
                first_coming = sum(not round.alone for round in self._waiting)
            if plan is None or self._waiting[0].alone:
                return
            if plan.wait_s <= 0.0:
                sessions = list(coming)
                await self._hurry(
                    {sessions[index - first_coming] for index in plan.num_drafted if index >= first_coming}
                )
                return
            self._arrival = trio.Event()
            with trio.move_on_after(plan.wait_s):
                await self._arrival.wait()

    async def _hurry(self, sessions: Set[int]) -> None:
        """Have sessions bring their rounds as they are, and wait until they have."""
        for session in sessions:
            self._ask_to_hurry(session)
        for _ in range(CHECKPOINTS_TO_HURRY * len(sessions)):
            if sessions <= {round.session for round in self._waiting}:
                return
            await trio.lowlevel.checkpoint()

    # --- under the lock, on either thread ---------------------------------------------------------

    def _coming(self, now_s: float) -> dict[int, ReadyRound]:
        """The rounds that do not wait yet, by session."""
        waiting, coming = {round.session for round in self._waiting}, {}
        # One that should be there already is waited for a little longer, since its moment is only a mean.
        patience_s = PATIENCE * self._prices.verify(1)
        for session, member in self._members.items():
            can_hurry = member.ended_s is not None and self._can_hurry(session)
            is_due = member.due_s + patience_s > now_s
            if session not in waiting and (is_due or can_hurry):
                due_s = max(0.0, member.due_s - now_s) + patience_s if is_due else math.inf
                num_needed = member.ready.num_needed if member.ready.reach else 1
                coming[session] = ReadyRound(num_needed, member.ready.reach, due_s=due_s, can_hurry=can_hurry)
        return coming

    def _plan(self, coming: Sequence[ReadyRound] = (), max_wait_s: float = 0.0) -> PassPlan | None:
        """The next pass, of the rounds that wait and then of those that come; None if none waits."""
        if not self._waiting:
            return None
        if self._waiting[0].alone:
            return plan_pass([self._waiting[0].ready], self._prices.verify, 1)
        rounds = [round.ready for round in self._waiting if not round.alone]
        return plan_pass([*rounds, *coming], self._prices.verify, self._most, max_wait_s=max_wait_s)

    def _chosen(self) -> dict[_WaitingRound, int]:
        """The rounds of the pass that could begin now, with how many of their drafted tokens each feeds."""
        if len(self._waiting) == 1:
            # A text's own policy has decided what its pass is worth.
            return {self._waiting[0]: len(self._waiting[0].ready.reach)}
        plan = self._plan()
        if plan is None:
            return {}
        rounds = [round for round in self._waiting if round is self._waiting[0] or not round.alone]
        return {rounds[index]: num_drafted for index, num_drafted in plan.num_drafted.items()}

    # --- on the worker's thread -------------------------------------------------------------------

    def _take(self, taken: _Taken, job: Job[Outcomes]) -> None:
        """Take rounds into a pass that begins."""
        if len(self._waiting) > 1 and self.num_shared > 1 and self._model.sharing_obstacle() is not None:
            self.num_shared = self._target_queue.max_batch = 1
        with self._lock:
            for round, num_drafted in self._chosen().items():
                round.feed(num_drafted)
                taken.rounds.append(round)
                self._waiting.remove(round)
            for round in self._waiting:
                round.ready = attrs.evolve(round.ready, was_passed_over=True)
            taken.goes_ahead = self._goes_ahead(taken.rounds)
        self._num_ahead = self._num_ahead + 1 if taken.goes_ahead else 0
        shares = tuple(round.share for round in taken.rounds)
        job.num_tokens = sum(share.num_tokens for share in shares)
        if len(shares) == 1:
            job.session, job.round = shares[0].session, shares[0].round
        else:
            job.shares = shares

    def _goes_ahead(self, taken: Sequence[_WaitingRound]) -> bool:
        """Whether the pass after one over these rounds will be over the same texts, as far as is known."""
        return (
            len(taken) > 1
            and len(taken) == len(self._members)
            and all(round.request.goes_on for round in taken)
            and self._num_ahead < MEASURED_EVERY
        )

    def _verify(self, taken: _Taken) -> Outcomes:
        requests = [round.request for round in taken.rounds]
        return verify(self._model, requests, goes_ahead=taken.goes_ahead) if requests else []


def _widths(taken: list[_WaitingRound], results: Outcomes) -> list[int]:
    """Tokens of each round that went through the model. What the proposals of failed rounds did to it is not known."""
    return [
        result.value.width if isinstance(result, outcome.Value) else round.share.num_tokens
        for round, result in zip(taken, results, strict=True)
    ]


def _shared(make: Callable[[Verified], SharedPass], result: outcome.Outcome[Verified]) -> SharedPass:
    return make(result.unwrap())
