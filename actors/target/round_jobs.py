"""The jobs of rounds: what the target's worker does for texts, and what becomes of the texts then.

A pass that fails is repeated without drafted tokens, and then a text at a time. What fails alone ends its text, and the
others share passes again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import trio

from actors.model import CachedSequence, CacheLostError, Model
from actors.prefill import prefill_committed
from actors.target.drafter_link import DrafterLink
from actors.target.parts import Part, next_part, stays_plain, verdict_of, verdict_so_far
from actors.target.plain_decoder import PlainDecoder
from actors.target.plain_rows import PlainRow, PlainRows
from actors.target.target_session import OneByOne, RoundFailure, TargetSession
from actors.target.verify import verify
from actors.workers.shared_jobs import Suspects
from actors.workers.worker import Job, JobError, Worker, job_error
from protocol.backoff import Backoff, SharingLimit
from protocol.cached_tokens import FeedPlan
from protocol.errors import OutriderError, ProtocolError
from protocol.messages import Verdict
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Share

# Every so many passes of texts without drafts, one is not started ahead, so that it shows what such a pass costs.
MEASURED_EVERY = 32


class RoundJobs:
    """Runs the jobs of rounds, one at a time, and applies their results.

    Attributes:
        texts: the sessions whose rounds are run, by id.
        running: those that have a part in the job that runs.
        has_shared: whether texts have shared a pass, so that the model is known to take several.
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
        on_commit: Callable[[TargetSession, Commit], None],
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
            on_commit: called with each commit; must not wait.
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
        self.has_shared = False
        self._plain_rows = PlainRows(model)
        self._num_ahead = 0  # passes in succession that were started ahead
        self._plain_ended_s: float | None = None  # when the last pass ended, if it was a plain one
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
        self.begin_clock(session)
        self._look_at(session)

    def begin_clock(self, session: TargetSession) -> None:
        """Note when a session's round begins."""
        session.round_began_s, session.busy_before_s = self._worker.clock(), self._worker.busy_seconds

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

    def _begin_job(self, sessions: Collection[TargetSession]) -> None:
        self.running = sessions
        self._pass_over = trio.Event()
        self._target_queue.begin([session.id for session in sessions], self._worker.clock())

    def _end_job(self, sessions: Collection[TargetSession]) -> None:
        now_s = self._worker.clock()
        for session in sessions:
            self._target_queue.leave(session.id, now_s)
        self.running = ()
        self._pass_over.set()

    # --- the jobs -----------------------------------------------------------------------------------

    async def read_again(self, session: TargetSession, sequence: CachedSequence) -> None:
        """Feed some of what a cache has lost of its text, in one pass of bounded size."""
        self._begin_job({session})
        to_feed = (*session.state.committed, *session.accepted)[:-1]
        try:
            await prefill_committed(
                self._worker, sequence, session.cached_tokens, session.state.opened, to_feed, self._chunk_size
            )
            session.reads_again = len(session.cached_tokens) < len(to_feed)
        except JobError as error:
            self.fail(session, error)
        finally:
            self._end_job({session})
        self._look_at(session)

    async def decode_alone(self, session: TargetSession, since_s: float, *, is_alone: bool) -> None:
        """A step of a text's own decoder, which could be taken since a moment on the worker's clock.

        Args:
            is_alone: whether no other text would share passes with it; otherwise the step starts none ahead.
        """
        self._begin_job({session})
        try:
            assert session.sequence is not None
            state, pipeline = session.state, session.shared.logits_pipeline
            decoder = session.decoder = session.decoder or PlainDecoder(session.sequence, state.opened, pipeline)
            plan = session.cached_tokens.plan(state.committed, num_logits=0 if decoder.is_ahead else 1)
            goes_ahead = is_alone and stays_plain(session)
            history = pipeline.history(state.committed)
            step = partial(decoder.step, plan, history, state.next_position, goes_ahead)
            job = Job("decode", step, session.id, 1, state.round)
            token, token_likelihoods, features = await self._worker.run(job, meanwhile=self.deliver)
            session.last_pass_s, session.pass_rounds, session.pass_rows = job.seconds, 0, 0
            session.shared.counts.wait(job.began - since_s)
            fed_ahead = (token,) if decoder.is_ahead else ()
            session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + fed_ahead))
            place = session.id, state.round, state.next_position
            verdict = Verdict(*place, 0, token, likelihoods=token_likelihoods, features=features)
            self._end_job({session})
            self._apply(session, verdict)
        except JobError as error:
            if not isinstance(error.__cause__, CacheLostError):
                self.fail(session, error)
        except Exception as error:  # of any kind: it ends this text, and the others go on
            self.fail(session, error)
        finally:
            self._end_job({session})
        self._look_at(session)

    async def run_pass(self, parts: list[Part]) -> bool:
        """A pass that texts share. Returns: whether a drafter has heard of verdicts, and may propose at once."""
        self.pass_began_s = self._worker.clock()
        taken = list(parts)
        self._plain_ended_s = None
        self._begin_job({part.session for part in taken})
        self._limit.count_job()
        job = Job("verify", partial(self._verify, parts), count=lambda _: _num_tokens(parts))
        job.prepare = partial(self._prepare, parts, job)
        has_failed = False
        try:
            await self._worker.run(job, meanwhile=self.deliver)
        except JobError as error:
            has_failed = True
            self._failed(parts, error)
        finally:
            self._end_job({part.session for part in taken})
        for part in taken:
            if part not in parts:  # texts of this model cannot share passes
                self.num_shared = self._target_queue.max_batch = 1
                self._look_at(part.session)
        if not has_failed:
            self._judged(parts, job)
        return any(part.session.state.phase is SessionPhase.PROPOSING for part in parts)

    async def run_plain_pass(self, sessions: Sequence[TargetSession]) -> list[TargetSession]:
        """A pass over texts that nobody drafts for.

        Args:
            sessions: as `next_plain` gave them.

        Returns: those of them that can have another such pass at once, in order.
        """
        num_texts, was_ahead = len(sessions), bool(self._plain_rows.ahead)
        goes_ahead = num_texts > 1 and self._num_ahead < MEASURED_EVERY and all(map(stays_plain, sessions))
        self._num_ahead = self._num_ahead + 1 if goes_ahead else 0
        rows, shares = [], []
        for session in sessions:
            assert session.sequence is not None
            state, shared = session.state, session.shared
            plan = session.cached_tokens.plan(state.committed)
            history = shared.logits_pipeline.history(state.committed)
            rows.append(PlainRow(session.sequence, shared.opened, shared.logits_pipeline, plan, history))
            shares.append(Share(session.id, state.round, len(plan.feed)))
            self._target_queue.enter(session.id, len(plan.feed))
        step = partial(self._plain_rows.step, rows, goes_ahead=goes_ahead)
        width = max([share.num_tokens for share in shares])
        job = Job("verify", step, num_tokens=sum([share.num_tokens for share in shares]), shares=tuple(shares))
        self._begin_job(set(sessions))
        self._limit.count_job()
        try:
            results = await self._worker.run(job, meanwhile=self.deliver)
        except JobError as error:
            self._plain_ended_s = None
            self._failed([next_part(session, self._prices, self._worker.clock()) for session in sessions], error)
            return []
        finally:
            self._end_job(sessions)
        self._price_plain_pass(job, num_texts, num_texts * width, is_typical=not was_ahead)
        going_on = []
        for session, row, result in zip(sessions, rows, results, strict=True):
            session.verify_seconds += job.seconds / num_texts
            session.was_plain = True
            if isinstance(result, CacheLostError):
                self._look_at(session)
                continue
            session.cached_tokens.follow(row.plan)
            if isinstance(result, Exception):
                self.fail(session, job_error(job, result))
            elif session.id in self.texts and session.state.phase is not SessionPhase.CLOSED:
                try:
                    if self._commit_own(session, result):
                        going_on.append(session)
                except Exception as error:  # of any kind: it ends this text, and the others go on
                    self.fail(session, error)
        return going_on

    def next_plain(self, sessions: Sequence[TargetSession]) -> Sequence[TargetSession]:
        """Those of some texts, of which `is_plain` is true, that have the next pass: at first those in a pass ahead."""
        ahead = set(self._plain_rows.ahead)
        return [session for session in sessions if session.sequence in ahead] or sessions

    def _price_plain_pass(self, job: Job[Any], num_texts: int, num_rows: int, *, is_typical: bool) -> None:
        """Learn from a pass without drafts. One that was started ahead has worked before its job began."""
        if is_typical:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        ended_s, self._plain_ended_s = self._plain_ended_s, job.ended
        if ended_s is not None and num_rows == num_texts > 1:
            pass_s = job.seconds if is_typical else self._prices.verify(num_rows)
            self._prices.observe_plain_round((job.ended - ended_s) / num_texts, pass_s / num_texts, num_texts=num_texts)

    def _commit_own(self, session: TargetSession, token: int) -> bool:
        """Commit a token of the target's own. Returns: whether another may follow in the same way at once."""
        state, shared = session.state, session.shared
        if shared.find_stop is None and state.phase is SessionPhase.UNDRAFTED:
            commit = state.commit_own(token)
            self._on_commit(session, commit)
        else:
            is_resting = state.phase is SessionPhase.RESTING
            verdict = session.with_stop(Verdict(session.id, state.round, state.next_position, 0, token))
            commit = self._commit(session, verdict)
            if is_resting:
                self._tell_drafter(session, verdict, commit)
        shared.unsent = commit
        shared.deliver_nowait()
        if commit.finish_reason is not None:
            session.text_over.set()
        elif shared.unsent is not None:
            session.is_blocked = True
        elif state.phase is SessionPhase.PROPOSING:
            self.begin_round(session)
        else:
            return True
        return False

    def _commit(self, session: TargetSession, verdict: Verdict) -> Commit:
        """Commit the tokens of a verdict."""
        commit = session.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        self._on_commit(session, commit)
        return commit

    def _tell_drafter(
        self, session: TargetSession, verdict: Verdict, commit: Commit, *, has_proposed: bool = False
    ) -> None:
        self._drafter.send_verdict(session, verdict, commit)
        # Not while a late drafter has something to propose: it may be late because of what it drew.
        if session.decodes_alone and not has_proposed:
            self._drafter.leave_behind(session)

    # --- on the worker's thread -------------------------------------------------------------------

    def _prepare(self, parts: list[Part], job: Job[Any]) -> None:
        if len(parts) > 1 and self._model.sharing_obstacle() is not None:
            del parts[1:]
        shares = tuple([Share(part.session.id, part.proposal.round, part.num_tokens) for part in parts])
        job.num_tokens = sum([share.num_tokens for share in shares])
        if len(shares) == 1:
            job.session, job.round = shares[0].session, shares[0].round
        else:
            job.shares = shares

    def _verify(self, parts: Sequence[Part]) -> list[Exception | None]:
        """Returns: of each part, the error that concerns its text alone, if there is one."""
        verify(self._model, parts)
        return [part.error for part in parts]

    # --- what comes of it -------------------------------------------------------------------------

    def _judged(self, parts: Sequence[Part], job: Job[Any]) -> None:
        """Apply the verdicts of a pass."""
        num_parts = len(parts)
        num_rows = num_parts * max([part.num_tokens for part in parts])
        # A text's cache is copied when it shares a pass for the first time.
        is_typical = num_parts == 1 or all(part.session.has_shared for part in parts)
        self.has_shared = self.has_shared or num_parts > 1
        if is_typical:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        for part in parts:
            session = part.session
            session.shared.counts.wait(job.began - part.since_s)
            session.last_pass_s = job.seconds / num_parts
            session.pass_rounds, session.pass_rows, session.pass_is_typical = num_parts, num_rows, is_typical
            session.pass_s = job.seconds
            session.ended_s, session.last_ready = job.ended, part.ready
            session.has_shared = session.has_shared or num_parts > 1
            if part.error is None:
                session.verify_seconds += session.last_pass_s
                self._acquit(part)
                try:
                    if (verdict := verdict_of(part, self._on_rewind)) is not None:
                        self._apply(session, verdict)
                except Exception as error:  # of any kind: it ends this text, and the others go on
                    self.fail(session, error)
            elif not isinstance(part.error, CacheLostError):
                self.fail(session, job_error(job, part.error))
            self._look_at(session)

    def _apply(self, session: TargetSession, verdict: Verdict) -> None:
        """Commit the tokens of a verdict, and begin the next round."""
        if session.id not in self.texts or session.state.phase is SessionPhase.CLOSED:
            return  # closed while the pass ran
        proposal, is_drafted = session.state.outstanding, session.state.phase is not SessionPhase.UNDRAFTED
        verdict = session.with_stop(verdict)
        round_s = self._round_seconds(session)
        commit = self._commit(session, verdict)
        session.shared.unsent, session.round_failure = commit, None
        if is_drafted:
            self._tell_drafter(session, verdict, commit, has_proposed=proposal is not None and bool(proposal.tokens))
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
            self._prices.observe_plain_round(
                round_s, session.pass_s / session.pass_rounds, num_texts=session.pass_rounds
            )

    # --- failures ---------------------------------------------------------------------------------

    def _failed(self, parts: Sequence[Part], error: JobError) -> None:
        """Have the rounds of a pass that failed computed again, or end the one that has failed alone."""
        if len(parts) == 1:
            self._failed_alone(parts[0], error)
            return
        with_drafts = [part for part in parts if part.feeds_drafted]
        suspected = with_drafts or parts
        suspects = Suspects(len(suspected), partial(self._limit.halve, len(parts)))
        for part in parts:
            session = part.session
            failure = session.round_failure = session.round_failure or RoundFailure()
            if part.feeds_drafted:
                session.suspects, failure.one_by_one = suspects, OneByOne(part.proposal)
            else:
                # If drafted tokens of others were the cause, those are left out now.
                failure.goes_alone = failure.has_failed or not with_drafts
                failure.suspects, failure.has_failed = None if with_drafts else suspects, True
            self._look_at(session)

    def _failed_alone(self, part: Part, error: JobError) -> None:
        session, failure = part.session, part.session.round_failure
        # Errors of ours would be the same without drafted tokens.
        if part.feeds_drafted and not isinstance(error.__cause__, OutriderError):
            session.suspects = Suspects(0, _ignore)
            session.drafts.fail()
            session.round_failure = RoundFailure(OneByOne(part.proposal))
        elif failure is not None and failure.one_by_one is not None and session.accepted:
            self._apply(session, verdict_so_far(failure.one_by_one, len(session.accepted)))
        else:
            self.fail(session, error)
        self._look_at(session)

    def _acquit(self, part: Part) -> None:
        """Note that a pass has not failed, after one that has."""
        session, failure = part.session, part.session.round_failure
        if failure is not None and failure.suspects is not None:
            failure.suspects.acquit()
            failure.suspects = None
        if part.feeds_drafted and session.suspects is not None:
            session.suspects.acquit()
            session.suspects, session.drafts = None, Backoff()


def _num_tokens(parts: Sequence[Part]) -> int:
    return sum([part.num_tokens for part in parts])


def _ignore() -> None:
    pass
