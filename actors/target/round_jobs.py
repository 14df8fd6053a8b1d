"""The jobs of rounds: what the target's worker does for texts, and what becomes of the texts then.

A pass that fails is repeated without drafted tokens, and then a text at a time. What fails alone ends its text, and the
others share passes again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import outcome
import trio

from actors.model import CachedSequence, CacheLostError, Model
from actors.prefill import prefill_committed
from actors.target.drafter_link import DrafterLink
from actors.target.rounds import Round, plain_step, verdict_of, verdict_of_step, verdict_so_far
from actors.target.target_session import OneByOne, RoundFailure, TargetSession
from actors.target.verify import Verified, verify
from actors.workers.shared_jobs import Suspects
from actors.workers.worker import Job, JobError, Worker, job_error
from protocol.backoff import Backoff, SharingLimit
from protocol.errors import OutriderError, ProtocolError
from protocol.messages import Verdict
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Share

Outcomes = list[outcome.Outcome[Verified]]

# Every so many passes of texts without drafts, one is not started ahead, so that it shows what such a pass costs.
MEASURED_EVERY = 32


class RoundJobs:
    """Runs the jobs of rounds, one at a time, and applies their results.

    Attributes:
        texts: the sessions whose rounds are run, by id.
        running: those that have a part in the job that runs.
        pass_began_s: when the last pass was handed to the worker, in seconds on its clock.
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
        look_at: Callable[[TargetSession], None],
        on_commit: Callable[[TargetSession, Verdict, Commit], None],
        on_rewind: Callable[[TargetSession, int], None],
    ) -> None:
        """Of one target.

        Args:
            model: lives on the worker's thread.
            worker: runs the jobs.
            prices: of the target; the passes are added to them.
            target_queue: shows the drafter which passes run.
            drafter: hears of the verdicts.
            chunk_size: of passes that read a text again.
            max_batch: most rounds in one pass, >= 1.
            look_at: called with each session whose state has changed; must not wait.
            on_commit: called with each commit and its verdict; must not wait.
            on_rewind: called with a session and the number of tokens, >= 1, that its cache was rewound by.
        """
        self._model = model
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._drafter = drafter
        self._chunk_size = chunk_size
        self._look_at = look_at
        self._on_commit = on_commit
        self._on_rewind = on_rewind
        self.texts: dict[int, TargetSession] = {}
        self.running: Collection[TargetSession] = ()
        self.pass_began_s = 0.0
        self.num_shared = max_batch
        self._limit = SharingLimit()
        self._num_ahead = 0  # passes in succession that were started ahead
        self._pass_over = trio.Event()

    @property
    def most_rounds(self) -> int:
        """Most rounds in the next pass."""
        return min(self.num_shared, self._limit.value)

    async def wait_for(self, session: TargetSession) -> None:
        """Wait until a session has no part in the job that runs."""
        while session in self.running:
            await self._pass_over.wait()

    def begin_round(self, session: TargetSession) -> None:
        """Begin a session's next round."""
        session.round_began_s, session.busy_before_s = self._worker.clock(), self._worker.busy_seconds
        self._look_at(session)

    def deliver(self) -> None:
        """Hand the consumers the commits of the last pass. Never waits."""
        for session in self.texts.values():
            session.shared.deliver_nowait()
            if session.is_blocked and session.shared.unsent is None:
                # Its consumer has taken a commit, and has not come so far as to tell.
                self._look_at(session)

    def fail(self, session: TargetSession, error: Exception) -> None:
        """End a text with an error."""
        session.failure = error
        session.text_over.set()

    def _begin_job(self, rounds: Sequence[Round]) -> None:
        self.running = {round.session for round in rounds}
        self._pass_over = trio.Event()
        self._target_queue.begin([round.session.id for round in rounds], self._worker.clock())

    def _end_job(self, rounds: Sequence[Round]) -> None:
        now_s = self._worker.clock()
        for round in rounds:
            self._target_queue.leave(round.session.id, now_s)
        self.running = ()
        self._pass_over.set()

    # --- the jobs -----------------------------------------------------------------------------------

    async def read_again(self, round: Round, sequence: CachedSequence) -> None:
        """Feed some of what a cache has lost of its text, in one pass of bounded size."""
        session = round.session
        self._begin_job([round])
        to_feed = (*session.state.committed, *session.accepted)[:-1]
        try:
            await prefill_committed(
                self._worker, sequence, session.cached_tokens, session.state.opened, to_feed, self._chunk_size
            )
            session.reads_again = len(session.cached_tokens) < len(to_feed)
        except JobError as error:
            self.fail(session, error)
        finally:
            self._end_job([round])
        self._look_at(session)

    async def decode_alone(self, round: Round, *, is_alone: bool) -> None:
        """A step of a text's own decoder."""
        session = round.session
        self._begin_job([round])
        try:
            step = plain_step(session, is_alone=is_alone)
            job = Job("decode", step.call, session.id, 1, session.state.round)
            decoded = await self._worker.run(job, meanwhile=self.deliver)
            session.last_pass_s, session.pass_rounds, session.pass_rows = job.seconds, 0, 0
            session.shared.counts.wait(job.began - round.since_s)
            verdict = verdict_of_step(session, step, decoded)
            self._end_job([round])
            self._apply(session, verdict)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                self.fail(session, error)
        except Exception as error:  # of any kind: it ends this text, and the others go on
            self.fail(session, error)
        finally:
            self._end_job([round])
        self._look_at(session)

    async def run_pass(self, rounds: list[Round]) -> bool:
        """A pass that texts share. Returns: whether a drafter has heard of verdicts, and may propose at once."""
        self.pass_began_s = self._worker.clock()
        was_ahead = self._num_ahead > 0
        goes_ahead = (
            len(rounds) > 1
            and len(rounds) == len(self.texts)
            and all(round.request.goes_on for round in rounds)
            and self._num_ahead < MEASURED_EVERY
        )
        self._num_ahead = self._num_ahead + 1 if goes_ahead else 0
        self._begin_job(rounds)
        self._limit.count_job()
        job: Job[Outcomes] = Job(
            "verify", partial(self._verify, rounds, goes_ahead), count=lambda results: sum(_widths(rounds, results))
        )
        job.prepare = partial(self._prepare, rounds, job)
        taken = list(rounds)
        outcomes: Outcomes | None = None
        try:
            outcomes = await self._worker.run(job, meanwhile=self.deliver)
        except JobError as error:
            self._failed(rounds, error)
        finally:
            self._end_job(taken)
        for round in taken:
            if round not in rounds:  # texts of this model cannot share passes
                self.num_shared = self._target_queue.max_batch = 1
                self._look_at(round.session)
        if outcomes is not None:
            self._judged(rounds, job, outcomes, is_typical=not was_ahead)
        return any(round.session.state.phase is SessionPhase.PROPOSING for round in rounds)

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

    def _judged(self, rounds: Sequence[Round], job: Job[Outcomes], outcomes: Outcomes, *, is_typical: bool) -> None:
        """Apply the verdicts of a pass."""
        num_rounds = len(rounds)
        num_rows = num_rounds * max(_widths(rounds, outcomes))
        # A text's cache is copied when it shares a pass for the first time.
        is_typical = num_rounds == 1 or (is_typical and all(round.session.has_shared for round in rounds))
        if is_typical:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
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
                    self.fail(session, job_error(job, result.error))
            elif isinstance(result, outcome.Value):
                session.verify_seconds += session.last_pass_s
                self._acquit(round)
                try:
                    if (verdict := verdict_of(round, result.value, self._on_rewind)) is not None:
                        self._apply(session, verdict)
                except Exception as error:  # of any kind: it ends this text, and the others go on
                    self.fail(session, error)
            self._look_at(session)

    def _apply(self, session: TargetSession, verdict: Verdict) -> None:
        """Commit the tokens of a verdict, and begin the next round."""
        if session.id not in self.texts or session.state.phase is SessionPhase.CLOSED:
            return  # closed while the pass ran
        proposal, is_drafted = session.state.outstanding, session.state.phase is not SessionPhase.UNDRAFTED
        verdict = session.with_stop(verdict)
        round_s = self._round_seconds(session)
        commit = session.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        session.shared.unsent, session.round_failure = commit, None
        self._on_commit(session, verdict, commit)
        if is_drafted:
            self._drafter.send_verdict(session, verdict, commit)
            # Not while a late drafter has something to propose: it may be late because of what it drew.
            if session.decodes_alone and (proposal is None or not proposal.tokens):
                self._drafter.leave_behind(session)
        if commit.round > 0:  # the first round waits for the drafter's prefill
            if proposal is not None:
                self._prices.observe_round(len(commit.tokens), round_s)
            elif session.was_plain:
                # The first plain round after a proposal cannot be a pass ahead, and its cost cannot be avoided.
                self._price_plain_round(session, round_s)
        session.was_plain = proposal is None
        self.begin_round(session)

    def _round_seconds(self, session: TargetSession) -> float:
        busy_s = self._worker.busy_seconds - session.busy_before_s
        idle_s = max(0.0, self._worker.clock() - session.round_began_s - busy_s)
        return session.last_pass_s + idle_s / len(self.texts)

    def _price_plain_round(self, session: TargetSession, round_s: float) -> None:
        if session.pass_rounds == 0:
            self._prices.observe_plain_round(round_s, session.last_pass_s)
        # If another text of the pass had drafted tokens, the pass says nothing about plain decoding.
        elif session.pass_rows == session.pass_rounds:
            # A pass that was started ahead has worked between the jobs, too.
            pass_s = session.pass_s if session.pass_is_typical else self._prices.verify(session.pass_rows)
            self._prices.observe_plain_round(round_s, pass_s / session.pass_rounds, num_texts=session.pass_rounds)

    # --- failures ---------------------------------------------------------------------------------

    def _failed(self, rounds: Sequence[Round], error: JobError) -> None:
        """Have the rounds of a pass that failed computed again, or end the one that has failed alone."""
        if len(rounds) == 1:
            self._failed_alone(rounds[0], error)
            return
        with_drafts = [round for round in rounds if round.request.feeds_drafted]
        suspected = with_drafts or rounds
        suspects = Suspects(len(suspected), partial(self._limit.halve, len(rounds)))
        for round in rounds:
            session = round.session
            failure = session.round_failure = session.round_failure or RoundFailure()
            if round.request.feeds_drafted:
                session.suspects, failure.one_by_one = suspects, OneByOne(round.request.proposal)
            else:
                # If drafted tokens of others were the cause, those are left out now.
                failure.goes_alone = failure.has_failed or not with_drafts
                failure.suspects, failure.has_failed = None if with_drafts else suspects, True
            self._look_at(session)

    def _failed_alone(self, round: Round, error: JobError) -> None:
        session, request = round.session, round.request
        failure = session.round_failure
        # Errors of ours would be the same without drafted tokens.
        if request.feeds_drafted and not isinstance(error.__cause__, OutriderError):
            session.suspects = Suspects(0, _ignore)
            session.drafts.fail()
            session.round_failure = RoundFailure(OneByOne(request.proposal))
        elif failure is not None and failure.one_by_one is not None and session.accepted:
            self._apply(session, verdict_so_far(session, failure.one_by_one, len(session.accepted)))
        else:
            self.fail(session, error)
        self._look_at(session)

    def _acquit(self, round: Round) -> None:
        """Note that a pass has not failed, after one that has."""
        session, failure = round.session, round.session.round_failure
        if failure is not None and failure.suspects is not None:
            failure.suspects.acquit()
            failure.suspects = None
        if round.request.feeds_drafted and session.suspects is not None:
            session.suspects.acquit()
            session.suspects, session.drafts = None, Backoff()


def _widths(rounds: Sequence[Round], results: Outcomes) -> list[int]:
    """Tokens of each round that went through the model. What the proposals of failed rounds did to it is not known."""
    return [
        result.value.width if isinstance(result, outcome.Value) else round.num_tokens
        for round, result in zip(rounds, results, strict=True)
    ]


def _ignore() -> None:
    pass
