"""The round loop: the one task that has the target's model work on the rounds of all texts.

It looks at the texts whose state has changed, decides on the next pass (`protocol.pass_plan`), has the worker run it,
hands the consumers the tokens of the pass before meanwhile, and applies the verdicts. All waiting is in one place:
until something changes, or until the earliest deadline.

A pass that fails is repeated without drafted tokens, and then a text at a time. What fails alone ends its text, and the
others share passes again at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import outcome
import trio

from actors.model import CachedSequence, CacheLostError, Model
from actors.prefill import prefill_committed
from actors.target.drafter_link import DrafterLink
from actors.target.rounds import Round, has_lost_tokens, next_round, plain_step, verdict_of, verdict_of_step
from actors.target.target_session import TargetSession
from actors.target.verify import Verified, verify
from actors.workers.worker import Job, JobError, Worker, job_error
from protocol.errors import ProtocolError
from protocol.messages import Verdict
from protocol.pass_plan import PassPlan, ReadyRound, plan_pass
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Share

Outcomes = list[outcome.Outcome[Verified]]

# Longest wait for rounds that are about to be ready, and how much longer than expected each is waited for: in units of
# a pass of one row.
MAX_WAIT, PATIENCE = 1.0, 0.02
# Every so many passes of texts without drafts, one is not started ahead, so that it shows what such a pass costs.
MEASURED_EVERY = 32
# Turns of the event loop within which a drafter that has drafted ahead answers a verdict.
ANSWER_TURNS = 3
# Rounds after which twice as many texts may share a pass again, since they were too many for the device.
ROUNDS_UNTIL_WIDER = 1024


class RoundLoop:
    """The rounds of all texts of one target.

    Attributes:
        num_shared: most rounds in one pass; 1 once it is known that texts of the model cannot share one.
    """

    def __init__(
        self,
        model: Model,
        worker: Worker,
        prices: Prices,
        target_queue: TargetQueue,
        drafter: DrafterLink,
        chunk_size: PrefillChunkSize,
        max_batch: int,
        *,
        num_sessions: Callable[[], int],
        on_commit: Callable[[TargetSession, Verdict, Commit], None],
        on_rewind: Callable[[TargetSession, int], None],
    ) -> None:
        """Make a loop without texts.

        Args:
            model: lives on the worker's thread.
            worker: runs the passes.
            prices: of the target; the passes are added to them.
            target_queue: shows the drafter which passes wait and run.
            drafter: hears of the verdicts.
            chunk_size: of passes that read a text again.
            max_batch: most rounds in one pass, >= 1.
            num_sessions: returns how many sessions the target has, those that read their prompts included.
            on_commit: called with each commit and its verdict; must not wait.
            on_rewind: called with a session and the number of tokens, >= 1, that its cache was rewound by.
        """
        self._model = model
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._drafter = drafter
        self._chunk_size = chunk_size
        self._num_sessions = num_sessions
        self._on_commit = on_commit
        self._on_rewind = on_rewind
        self.num_shared = max_batch
        self._max_shared = max_batch
        self._num_narrow = 0  # rounds since texts were too many for one pass
        self._suspects: set[TargetSession] = set()  # texts of a pass that failed; each has a pass for itself
        self._num_suspects = 0
        # Held while the worker is used for more than a moment, so that a pass is decided on when it can begin.
        self.turn = trio.Lock()
        self._texts: dict[int, TargetSession] = {}
        self._changed: dict[TargetSession, None] = {}
        self._ready: dict[TargetSession, Round] = {}  # in the order in which they became ready
        self._running: set[TargetSession] = set()
        self._worked_for: set[TargetSession] = set()  # in the last job
        self._pass_over = trio.Event()
        self._hurried: set[TargetSession] = set()
        self._hurried_until_s = -math.inf
        self._waits_until_s = math.inf  # for further rounds, before the pass that could begin
        self._num_ahead = 0  # passes in succession that were started ahead
        self._wakeup = trio.Event()

    # --- what others tell it ----------------------------------------------------------------------

    async def decode(self, session: TargetSession) -> None:
        """Run the rounds of a text whose prompt was read, until it is over.

        Cancellation: waits for the pass in which the text has a part.

        Raises:
            JobError: a job has failed because of this text, or of the model; the error is the cause.
            Whatever else concerns this text alone.
        """
        self._texts[session.id] = session
        session.shared.on_room = partial(self.look_at, session)
        self._begin_round(session)
        try:
            await session.text_over.wait()
        finally:
            self._forget(session)
            with trio.CancelScope(shield=True):
                while session in self._running:
                    await self._pass_over.wait()
        if session.failure is not None:
            raise session.failure

    def look_at(self, session: TargetSession) -> None:
        """Look at a text whose state has changed. Never waits."""
        if session.id in self._texts:
            self._changed[session] = None
            self._wakeup.set()

    def _forget(self, session: TargetSession) -> None:
        del self._texts[session.id]
        self._changed.pop(session, None)
        if self._ready.pop(session, None) is not None:
            self._target_queue.leave(session.id, self._worker.clock())
        self._hurried.discard(session)
        session.shared.on_room = None
        self._wakeup.set()

    # --- the loop ---------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def serve(self) -> None:
        """Run passes until cancelled.

        Cancellation: after the running pass.
        """
        while True:
            wait_s = self._wait_s()
            if wait_s > 0.0:
                self._deliver()
                with trio.move_on_after(wait_s):
                    await self._wakeup.wait()
                continue
            # Each of these has one turn before others use the worker again, also where each has a job for itself. Those
            # that become ready meanwhile may share their passes.
            due = set(self._ready)
            async with self.turn:
                while not due.isdisjoint(self._ready) and self._wait_s() <= 0.0:
                    await self._work()
                    due -= self._worked_for

    def _wait_s(self) -> float:
        """Seconds until there may be something for the worker to do, unless something changes; 0 for now."""
        self._wakeup = trio.Event()
        self._take_in()
        now_s = self._worker.clock()
        deadline_s = self._time_out(now_s)
        if self._changed:
            self._take_in()
        if not self._ready:
            self._waits_until_s = math.inf
            return deadline_s - now_s
        first = next(iter(self._ready.values()))
        if first.alone or len(self._texts) == 1 or self._goes_by_itself(first):
            return 0.0
        return self._wait_for_more_s(now_s)

    def _take_in(self) -> None:
        """Look at the texts that have changed."""
        changed, self._changed = self._changed, {}
        for session in changed:
            if session in self._running or session in self._ready or session.text_over.is_set():
                continue
            was_blocked, session.is_blocked = session.is_blocked, session.shared.is_blocked
            if session.state.phase is SessionPhase.CLOSED:
                session.text_over.set()
            elif session.is_blocked:
                session.awaits_proposal_since_s = None
            else:
                if was_blocked:
                    self._begin_round(session)
                if session.state.phase is SessionPhase.PROPOSING:
                    self._await_proposal(session)
                else:
                    self._make_ready(session)

    def _await_proposal(self, session: TargetSession) -> None:
        if session.awaits_proposal_since_s is None:
            session.awaits_proposal_since_s = self._worker.clock()
            session.was_asked = False
        # Anew each time, since the drafter may have become ready.
        session.proposal_due_s = session.awaits_proposal_since_s + self._drafter.timeout_s(session)

    def _make_ready(self, session: TargetSession) -> None:
        now_s = self._worker.clock()
        session.awaits_proposal_since_s = None
        self._hurried.discard(session)
        assert session.sequence is not None
        session.sequence.record_features(session.state.phase is not SessionPhase.UNDRAFTED)
        self._prices.num_texts = max(1, min(len(self._texts), self.num_shared))
        try:
            round = next_round(session, self._prices, now_s, without_drafts=session.is_careful)
        except Exception as error:  # of any kind: it ends this text, and the others go on
            self._fail(session, error)
            return
        round.alone = session in self._suspects
        if session.ended_s is not None:
            session.turnaround_s.observe(now_s - session.ended_s)
            session.ended_s = None
        self._ready[session] = round
        self._target_queue.enter(session.id, round.ready.max_width)

    def _time_out(self, now_s: float) -> float:
        """Give up waiting for proposals that are due. Returns: when the next one is."""
        next_s = math.inf
        for session in self._texts.values():
            if session.awaits_proposal_since_s is None or session.was_asked:
                continue
            if session.proposal_due_s <= now_s:
                self._await_proposal(session)
            if session.proposal_due_s <= now_s:
                session.was_asked = True
                self._drafter.time_out(session)
                self._changed[session] = None
            else:
                next_s = min(next_s, session.proposal_due_s)
        return next_s

    def _goes_by_itself(self, round: Round) -> bool:
        """Whether a round has a step of the decoder, or a job that reads its text again, instead of a pass."""
        session = round.session
        sequence = session.sequence
        assert sequence is not None
        return has_lost_tokens(session, sequence) or self._is_decoded_alone(session)

    def _is_decoded_alone(self, session: TargetSession) -> bool:
        """Whether a round without a proposal is decoded a pass ahead, instead of in a pass that others may share."""
        if session.state.outstanding is not None or session in self._suspects:
            return False
        is_ahead = session.decoder is not None and session.decoder.is_ahead
        return is_ahead or self._num_sessions() == 1 or self.num_shared == 1

    # --- which rounds share the next pass ---------------------------------------------------------

    def _wait_for_more_s(self, now_s: float) -> float:
        """Seconds for which a pass waits for rounds that are about to be ready, as long as it gains by that."""
        if math.isinf(self._waits_until_s):
            self._waits_until_s = now_s + MAX_WAIT * self._prices.verify(1)
        if self._hurried and now_s < self._hurried_until_s:
            return self._hurried_until_s - now_s
        coming = self._coming(now_s)
        if not coming:
            return 0.0
        rounds = self._sharing()
        plan = plan_pass(
            [*(round.ready for round in rounds), *coming.values()],
            self._prices.verify,
            self.num_shared,
            max_wait_s=self._waits_until_s - now_s,
        )
        if plan.wait_s > 0.0:
            return plan.wait_s
        sessions = list(coming)
        hurried = {sessions[i - len(rounds)] for i in plan.num_drafted if i >= len(rounds)} - self._hurried
        if not hurried:
            return 0.0
        for session in hurried:
            self._drafter.hurry(session)
        self._hurried |= hurried
        self._hurried_until_s = now_s + max(PATIENCE * self._prices.verify(1), 1e-9)
        return self._hurried_until_s - now_s

    def _coming(self, now_s: float) -> dict[TargetSession, ReadyRound]:
        """The rounds that are not ready yet, and are expected."""
        coming = {}
        # One that should be there already is waited for a little longer, since its moment is only a mean.
        patience_s = PATIENCE * self._prices.verify(1)
        for session in self._texts.values():
            if session in self._ready or session.ended_s is None or session in self._hurried:
                continue
            can_hurry = session.awaits_proposal_since_s is not None and self._drafter.can_hurry(session)
            due_s = session.ended_s + session.turnaround_s.value + patience_s - now_s
            if due_s > 0.0 or can_hurry:
                num_needed = session.last_ready.num_needed if session.last_ready.reach else 1
                coming[session] = ReadyRound(
                    num_needed,
                    session.last_ready.reach,
                    due_s=max(due_s, patience_s) if due_s > 0.0 else math.inf,
                    can_hurry=can_hurry,
                )
        return coming

    def _sharing(self) -> list[Round]:
        """The rounds that could share the next pass, the first of those that are ready at the front."""
        return [round for round in self._ready.values() if not round.alone and not self._goes_by_itself(round)]

    def _chosen(self) -> list[Round]:
        """The rounds of the pass that begins now, cut to the drafted tokens that they feed."""
        first = next(iter(self._ready.values()))
        if first.alone:
            return [first]
        rounds = self._sharing()
        if len(rounds) == 1:
            # A text's own policy has decided what its pass is worth.
            return rounds
        plan: PassPlan = plan_pass([round.ready for round in rounds], self._prices.verify, self.num_shared)
        chosen = []
        for index, round in enumerate(rounds):
            if index in plan.num_drafted:
                round.cut(plan.num_drafted[index])
                chosen.append(round)
        return chosen

    # --- the work ---------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Run the next job."""
        first = next(iter(self._ready.values()))
        session = first.session
        assert session.sequence is not None
        self._waits_until_s = math.inf
        if has_lost_tokens(session, session.sequence):
            await self._read_again(session, session.sequence)
        elif self._is_decoded_alone(session):
            await self._decode_alone(first)
        else:
            await self._pass(self._chosen())

    def _take(self, rounds: Sequence[Round]) -> None:
        for round in rounds:
            del self._ready[round.session]
        self._running = self._worked_for = {round.session for round in rounds}
        self._pass_over = trio.Event()
        self._target_queue.begin([round.session.id for round in rounds], self._worker.clock())

    def _end_pass(self, rounds: Sequence[Round]) -> None:
        now_s = self._worker.clock()
        for round in rounds:
            self._target_queue.leave(round.session.id, now_s)
        self._running = set()
        self._pass_over.set()

    async def _read_again(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Feed some of what a cache has lost of its text, in one pass of bounded size."""
        round = self._ready[session]
        self._take([round])
        committed = session.state.committed[:-1]
        try:
            await prefill_committed(
                self._worker, sequence, session.cached_tokens, session.state.opened, committed, self._chunk_size
            )
            session.reads_again = len(session.cached_tokens) < len(committed)
        except JobError as error:
            self._fail(session, error)
        finally:
            self._end_pass([round])
        self.look_at(session)

    async def _decode_alone(self, round: Round) -> None:
        """A step of a text's own decoder."""
        session = round.session
        step = plain_step(session, is_alone=self._num_sessions() == 1 or self.num_shared == 1)
        job = Job("decode", step.call, session.id, 1, session.state.round)
        self._take([round])
        verdict = None
        try:
            decoded = await self._worker.run(job, meanwhile=self._deliver)
            session.last_pass_s, session.pass_rounds, session.pass_rows = job.seconds, 0, 0
            session.shared.counts.wait(job.began - round.since_s)
            verdict = verdict_of_step(session, step, decoded)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                self._fail(session, error)
        finally:
            self._end_pass([round])
        if verdict is not None:
            self._apply(session, verdict)
        self.look_at(session)

    async def _pass(self, rounds: list[Round]) -> None:
        """A pass that texts share."""
        was_ahead = self._num_ahead > 0
        goes_ahead = (
            len(rounds) > 1
            and len(rounds) == len(self._texts)
            and all(round.request.goes_on for round in rounds)
            and self._num_ahead < MEASURED_EVERY
        )
        self._num_ahead = self._num_ahead + 1 if goes_ahead else 0
        passed_over = [round for round in self._ready.values() if round not in rounds]
        self._take(rounds)
        job: Job[Outcomes] = Job(
            "verify", partial(self._verify, rounds, goes_ahead), count=lambda results: sum(_widths(rounds, results))
        )
        job.prepare = partial(self._prepare, rounds, job)
        taken = list(rounds)
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._worker.run(job, meanwhile=self._deliver)
        except JobError as error:
            self._failed(rounds, error)
        finally:
            self._end_pass(taken)
        for round in passed_over:
            round.ready = ReadyRound(round.ready.num_needed, round.ready.reach, was_passed_over=True)
        for round in taken:
            if round not in rounds:  # texts of this model cannot share passes
                self.num_shared = self._max_shared = self._target_queue.max_batch = 1
                self.look_at(round.session)
        if outcomes is not None:
            await self._judged(rounds, job, outcomes, is_typical=not was_ahead)

    # --- on the worker's thread -------------------------------------------------------------------

    def _prepare(self, rounds: list[Round], job: Job[Outcomes]) -> None:
        if len(rounds) > 1 and self._model.sharing_obstacle() is not None:
            del rounds[1:]
        shares = tuple(Share(round.session.id, round.request.proposal.round, round.num_tokens) for round in rounds)
        job.num_tokens = sum(share.num_tokens for share in shares)
        if len(shares) == 1:
            job.session, job.round = shares[0].session, shares[0].round
        else:
            job.shares = shares

    def _verify(self, rounds: Sequence[Round], goes_ahead: bool) -> Outcomes:
        return verify(self._model, [round.request for round in rounds], goes_ahead=goes_ahead and len(rounds) > 1)

    # --- what comes of it -------------------------------------------------------------------------

    async def _judged(
        self, rounds: Sequence[Round], job: Job[Outcomes], outcomes: Outcomes, *, is_typical: bool
    ) -> None:
        """Apply the verdicts of a pass."""
        num_rounds = len(rounds)
        num_rows = num_rounds * max(_widths(rounds, outcomes))
        # A text's cache is copied when it shares a pass for the first time.
        is_typical = num_rounds == 1 or (is_typical and all(round.session.has_shared for round in rounds))
        if is_typical:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        answers = False
        for round, result in zip(rounds, outcomes, strict=True):
            session = round.session
            session.shared.counts.wait(job.began - round.since_s)
            session.last_pass_s = job.seconds / num_rounds
            session.pass_rounds, session.pass_rows, session.pass_is_typical = num_rounds, num_rows, is_typical
            session.pass_s = job.seconds
            session.ended_s, session.last_ready = job.ended, round.ready
            session.has_shared = session.has_shared or num_rounds > 1
            if isinstance(result, outcome.Error):
                if not isinstance(result.error, CacheLostError):
                    self._fail(session, job_error(job, result.error))
            elif isinstance(result, outcome.Value):
                session.verify_seconds += session.last_pass_s
                self._acquit(session)
                try:
                    self._apply(session, verdict_of(round, result.value, self._on_rewind))
                except Exception as error:  # of any kind: it ends this text, and the others go on
                    self._fail(session, error)
            answers = answers or session.state.phase is SessionPhase.PROPOSING
            self.look_at(session)
        if answers and len(self._texts) > 1:
            for _ in range(ANSWER_TURNS):
                await trio.lowlevel.checkpoint()

    def _apply(self, session: TargetSession, verdict: Verdict) -> None:
        """Commit the tokens of a verdict, and begin the next round."""
        if session.id not in self._texts or session.state.phase is SessionPhase.CLOSED:
            return  # closed while the pass ran
        proposal, is_drafted = session.state.outstanding, session.state.phase is not SessionPhase.UNDRAFTED
        verdict = session.with_stop(verdict)
        round_s = self._round_seconds(session)
        commit = session.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        session.shared.unsent = commit
        self._on_commit(session, verdict, commit)
        if is_drafted:
            self._drafter.send(verdict)
            if session.decodes_alone and session.state.phase in (SessionPhase.PROPOSING, SessionPhase.RESTING):
                self._drafter.leave_behind(session)
        if commit.round > 0:  # the first round waits for the drafter's prefill
            if proposal is not None:
                self._prices.observe_round(len(commit.tokens), round_s)
            elif session.was_plain:
                # The first plain round after a proposal cannot be a pass ahead, and its cost cannot be avoided.
                self._price_plain_round(session, round_s)
        session.was_plain = proposal is None
        self._begin_round(session)

    def _begin_round(self, session: TargetSession) -> None:
        session.round_began_s, session.busy_before_s = self._worker.clock(), self._worker.busy_seconds
        self.look_at(session)

    def _round_seconds(self, session: TargetSession) -> float:
        busy_s = self._worker.busy_seconds - session.busy_before_s
        idle_s = max(0.0, self._worker.clock() - session.round_began_s - busy_s)
        return session.last_pass_s + idle_s / len(self._texts)

    def _price_plain_round(self, session: TargetSession, round_s: float) -> None:
        if session.pass_rounds == 0:
            self._prices.observe_plain_round(round_s, session.last_pass_s)
        # If another text of the pass had drafted tokens, the pass says nothing about plain decoding.
        elif session.pass_rows == session.pass_rounds:
            # A pass that was started ahead has worked between the jobs, too.
            pass_s = session.pass_s if session.pass_is_typical else self._prices.verify(session.pass_rows)
            self._prices.observe_plain_round(round_s, pass_s / session.pass_rounds, num_texts=session.pass_rounds)

    def _deliver(self) -> None:
        """Hand the consumers the commits of the last pass. Never waits."""
        for session in self._texts.values():
            session.shared.deliver_nowait()

    # --- failures ---------------------------------------------------------------------------------

    def _failed(self, rounds: Sequence[Round], error: JobError) -> None:
        """Have the rounds of a pass that failed computed again, or end the one that has failed alone."""
        if any(round.has_drafts for round in rounds):
            for round in rounds:
                round.session.be_careful()
        elif len(rounds) > 1:
            self._suspects, self._num_suspects = {round.session for round in rounds}, len(rounds)
        else:
            self._fail(rounds[0].session, error)
        for round in rounds:
            self.look_at(round.session)

    def _acquit(self, session: TargetSession) -> None:
        """Note that a pass did not fail. If no text fails alone that others have failed with, they are too many."""
        session.num_careful = max(0, session.num_careful - 1)
        if session in self._suspects:
            self._suspects.discard(session)
            if not self._suspects:
                self.num_shared, self._num_narrow = max(1, self._num_suspects // 2), 0
        elif self.num_shared < self._max_shared:
            self._num_narrow += 1
            if self._num_narrow >= ROUNDS_UNTIL_WIDER:
                self.num_shared, self._num_narrow = min(self._max_shared, 2 * self.num_shared), 0

    def _fail(self, session: TargetSession, error: Exception) -> None:
        """End a text with an error."""
        if session in self._suspects:
            self._suspects.clear()  # it was the one
        session.failure = error
        session.text_over.set()


def _widths(rounds: Sequence[Round], results: Outcomes) -> list[int]:
    """Tokens of each round that went through the model. What the proposals of failed rounds did to it is not known."""
    return [
        result.value.width if isinstance(result, outcome.Value) else round.num_tokens
        for round, result in zip(rounds, results, strict=True)
    ]
