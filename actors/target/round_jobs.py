"""The jobs of rounds: runs passes over texts on the target's worker, and applies their results to the texts.

A pass that fails is repeated without drafted tokens, and then one text at a time. A text that fails alone is ended, and
the others share passes again at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import attrs

from actors.model import CacheLostError, Model
from actors.prefill import prefill_chunk
from actors.target.drafter_link import DrafterLink
from actors.target.parts import Part, num_plain_rounds, verdict_of
from actors.target.plain_rows import PlainResult, PlainRow, PlainRows
from actors.target.target_session import TargetSession
from actors.target.verify import verify
from actors.workers.worker import Job, JobError, Steps, Worker, job_error
from protocol.errors import ProtocolError
from protocol.messages import Verdict
from protocol.pass_plan import ReadyRound
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Share

# After this many passes without drafts that were started ahead, one is not, and starts none ahead, to measure what such
# a pass costs: on a CPU, MLX returns from launching a pass only when most of it is computed.
MEASURED_EVERY = 32


@attrs.define(eq=False)
class _PlainRun:
    """Passes in a row over texts that nobody drafts for.

    Attributes:
        sessions, shares: the texts, with their shares in the first pass.
        num_passes: the most passes that are still to finish.
        goes_ahead: whether the last of them launches one more pass ahead.
        steps: the passes, for the worker.
        is_first: whether no pass has finished yet.
        going_on: the texts that can take part in another such pass, as of the last one that finished.
    """

    sessions: Sequence[TargetSession]
    num_passes: int
    goes_ahead: bool
    shares: Sequence[Share]
    steps: Steps[list[PlainResult]] = attrs.field(init=False)
    is_first: bool = True
    going_on: list[TargetSession] = attrs.field(factory=list)


class RoundJobs:
    """Runs the jobs of rounds, one at a time, and applies their results.

    Attributes:
        texts: the sessions whose rounds are run, by id.
        pass_began_s: when the last pass was handed to the worker, in seconds on its clock.
        max_batch: most rounds in one pass.
        most_rounds: most rounds in the next pass; fewer after a shared pass has failed, as if it had been too large for
            the memory.
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
        note: Callable[..., None],
    ) -> None:
        """The jobs of one target.

        Args:
            model: lives on the worker's thread.
            worker: runs the jobs.
            prices: of the target; the passes are added to them.
            target_queue: shows the drafter which passes run.
            drafter: hears of the verdicts.
            chunk_size: of passes that read lost tokens again.
            max_batch: most rounds in one pass, >= 1.
            look_at: called with a session that has ended, or whose consumer has made room; must not wait.
            note: notes an event of a session; see `Actor._note`.
        """
        self._model = model
        self._worker = worker
        self._prices = prices
        self._target_queue = target_queue
        self._drafter = drafter
        self._chunk_size = chunk_size
        self._look_at = look_at
        self._note = note
        self.texts: dict[int, TargetSession] = {}
        self.pass_began_s = 0.0
        self.max_batch = self.most_rounds = max_batch
        self._plain_rows = PlainRows(model)
        self._plain_run: _PlainRun | None = None
        self._num_ahead = 0  # passes in succession that were started ahead; -1 if the next one is to be measured
        self._num_before = 0  # texts at the end of the last pass
        # When the last pass ended, and the worker's busy seconds by then: in the first if that pass was without drafts,
        # in the second if it was over proposals.
        self._last_plain: tuple[float, float] | None = None
        self._last_drafted: tuple[float, float] | None = None

    def begin_round(self, session: TargetSession) -> None:
        """Note that a session's next round begins."""
        session.round_began_s, session.busy_before_s = self._worker.clock(), self._worker.busy_seconds

    def deliver(self) -> None:
        """Hand the consumers the commits of the last pass. Never waits."""
        for session in self.texts.values():
            session.shared.deliver_nowait()
            if session.is_blocked and session.shared.unsent is None:
                # Its consumer has taken a commit, but has not called `make_room` yet.
                self._look_at(session)

    def pause(self) -> None:
        """Note that there is nothing to do for now, so that this time is not counted as part of a plain round."""
        self._last_plain = None

    def fail(self, session: TargetSession, error: Exception) -> None:
        """End a text with an error."""
        session.failure = session.failure or error
        self._look_at(session)

    def _begin_job(self, sessions: Collection[TargetSession]) -> None:
        self._target_queue.begin([session.id for session in sessions], self._worker.clock())

    def _end_job(self, sessions: Collection[TargetSession]) -> None:
        now_s = self._worker.clock()
        for session in sessions:
            self._target_queue.leave(session.id, now_s)

    # --- the jobs -----------------------------------------------------------------------------------

    async def read_again(self, session: TargetSession) -> None:
        """Feed some of the tokens that a text's cache has lost, in one pass of bounded size."""
        self._begin_job([session])
        try:
            await prefill_chunk(self._worker, session, session.state.committed[:-1], self._chunk_size)
        except JobError as error:
            self.fail(session, error)
        finally:
            self._end_job([session])

    async def run_pass(self, parts: list[Part]) -> None:
        """Run a pass that texts share."""
        self.pass_began_s = self._worker.clock()
        self._last_plain = None
        sessions = [part.session for part in parts]
        is_alone = len(parts) == 1 and (parts[0].alone or not sessions[0].is_row)
        self._begin_job(sessions)
        proposals = [part.proposal for part in parts if part.proposal.tokens]
        only_copies = bool(proposals) and all(each.copied and all(each.copied) for each in proposals)
        job = Job("verify", partial(self._verify, parts), count=lambda _: _num_tokens(parts))
        job.num_tokens = _num_tokens(parts)
        if len(parts) == 1:
            job.session, job.round = sessions[0].id, parts[0].proposal.round
        else:
            job.shares = tuple([Share(part.session.id, part.proposal.round, part.num_tokens) for part in parts])
        try:
            await self._worker.run(job, meanwhile=self.deliver)
        except JobError as error:
            self._last_drafted = None
            drafted = [part.session for part in parts if part.feeds_drafted]
            self._failed(sessions, drafted, error, is_alone=is_alone)
        else:
            if only_copies and self._last_drafted is not None:
                self._prices.observe_gap(min(job.seconds, self._idle_s(self._last_drafted, job)))
            self._judged(parts, job)
            self._last_drafted = job.ended, self._worker.busy_seconds
        finally:
            self._end_job(sessions)

    async def run_plain_passes(
        self, sessions: Sequence[TargetSession], *, goes_ahead: bool, may_repeat: bool
    ) -> list[TargetSession]:
        """Run passes over texts that nobody drafts for: one, or several in a row until something changes.

        Args:
            sessions: at least one, and only one if `max_batch` is 1; `is_plain` is true of each.
            goes_ahead: whether the next such pass may be started ahead.
            may_repeat: whether several passes may run in a row, since there is nothing else to do.

        Returns: the sessions that can take part in another such pass at once, in order; the others have changed.
        """
        num_texts = len(sessions)
        num_rounds = min(map(num_plain_rounds, sessions))
        goes_ahead = goes_ahead and num_rounds > 1 and (num_texts == 1 or 0 <= self._num_ahead < MEASURED_EVERY)
        num_passes = self._num_passes(sessions, num_rounds) if goes_ahead and may_repeat else 1
        goes_ahead = goes_ahead and num_rounds > num_passes
        rows = [plain_row(session) for session in sessions]
        shares = tuple(
            [
                Share(session.id, session.state.round, max(1, len(row.plan.feed)))
                for session, row in zip(sessions, rows, strict=True)
            ]
        )
        for share in shares:
            self._target_queue.enter(share.session, share.num_tokens)
        run = _PlainRun(sessions, num_passes, goes_ahead, shares)
        step = partial(self._plain_rows.steps, rows, shares, num_passes, goes_ahead=goes_ahead)
        num_tokens = sum([share.num_tokens for share in shares])
        run.steps = steps = Steps("verify", step, partial(self._decoded, run), num_tokens=num_tokens)
        if num_texts == 1:
            steps.kind, steps.session, steps.round = "decode", sessions[0].id, sessions[0].state.round
        else:
            steps.shares = shares
        is_alone = num_texts == 1 and not sessions[0].is_row
        self._begin_job(sessions)
        self._last_drafted = None
        self.deliver()
        self._plain_run = run
        try:
            await self._worker.run_steps(steps)
        except JobError as error:
            self._last_plain, self._num_ahead, run.going_on = None, 0, []
            self._failed([session for session in sessions if not session.has_ended], [], error, is_alone=is_alone)
        finally:
            self._plain_run = None
            self._end_job(sessions)
        return run.going_on

    def _num_passes(self, sessions: Sequence[TargetSession], num_rounds: float) -> int:
        """Most passes in a row: each commit must fit into its channel, even if the consumer takes nothing meanwhile."""
        if any(session.shared.logits_pipeline.needs_text for session in sessions):
            return 1
        room = min(session.shared.room for session in sessions)
        return int(max(1, min(num_rounds, room, MEASURED_EVERY)))

    def interrupt(self) -> None:
        """End a run of passes without drafts after the current pass, since there may be other work."""
        if self._plain_run is not None:
            self._plain_run.steps.interrupt()

    def _decoded(self, run: _PlainRun, job: Job[Any], results: Sequence[PlainResult], goes_on: bool) -> None:
        """Apply the results of a pass over texts that nobody drafts for. The next one may be running already."""
        num_texts = len(results)
        run.num_passes -= 1
        is_ahead = run.num_passes > 0 or run.goes_ahead
        was_ahead, is_next_measured = self._num_ahead > 0, self._num_ahead >= MEASURED_EVERY
        self._num_ahead = max(0, self._num_ahead) + 1 if is_ahead else -is_next_measured
        is_typical = self._is_typical(run.sessions) and not (was_ahead or is_ahead)
        width = max([share.num_tokens for share in run.shares]) if run.is_first else 1
        num_rows = self._num_rows(run.sessions) * width
        self._price_plain_pass(job, num_texts, num_rows, is_typical=is_typical, was_ahead=was_ahead)
        run.is_first = False
        run.going_on = []
        for session, result in zip(run.sessions, results, strict=True):
            session.shared.counts.wait(job.began - session.round_began_s)
            session.verify_seconds += job.seconds / num_texts
            session.round_began_s, session.busy_before_s = job.ended, self._worker.busy_seconds
            session.was_plain = True
            session.has_shared = session.has_shared or num_texts > 1
            if result.fed is not None:
                session.cached_tokens.follow(result.fed)
            if session.has_ended or isinstance(result.token, CacheLostError):
                continue  # the tokens that its cache has lost are read again
            if isinstance(result.token, Exception):
                self.fail(session, job_error(job, result.token))
                continue
            try:
                if self._commit_own(session, result, result.token):
                    run.going_on.append(session)
            except Exception as error:  # of any kind: it ends this text, and the others go on
                self.fail(session, error)
        if len(run.sessions) == 1:
            run.steps.round = run.sessions[0].state.round
        if len(run.going_on) < len(run.sessions):
            run.steps.interrupt()
        if goes_on:
            self._target_queue.begin_again(job.ended)

    def _is_typical(self, sessions: Sequence[TargetSession]) -> bool:
        """Whether the pass that has just ended copied no caches: that of a text which shares a pass for the first time,
        or those of the others after one has ended. To be asked once a pass, since it compares with the pass before.
        """
        num_before, self._num_before = self._num_before, len(self.texts)
        is_new = len(sessions) > 1 and not all(session.has_shared for session in sessions)
        return not is_new and len(self.texts) >= num_before

    def _num_rows(self, sessions: Sequence[TargetSession]) -> int:
        """How many texts a pass over these sessions computed: if any is a row of the batch, also all its other rows."""
        if not any(session.is_row for session in sessions):
            return len(sessions)
        return len({*sessions, *(session for session in self.texts.values() if session.is_row)})

    def _price_plain_pass(
        self, job: Job[Any], num_texts: int, num_rows: int, *, is_typical: bool, was_ahead: bool
    ) -> None:
        """Learn from a pass without drafts. One that was started ahead began before its job, so it does not show what a
        pass costs; but it shows what a plain round of several texts costs, since nearly all of those are passes ahead.
        """
        if is_typical and len(self.texts) > 1:
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        last, self._last_plain = self._last_plain, (job.ended, self._worker.busy_seconds)
        if last is not None and num_rows == num_texts and (was_ahead or num_texts == 1):
            self._prices.observe_plain_round(job.seconds + self._idle_s(last, job), num_texts=num_texts)

    def _idle_s(self, last: tuple[float, float], job: Job[Any]) -> float:
        """Seconds for which the worker was idle between the last pass and a job that has just ended."""
        ended_s, busy_s = last
        return max(0.0, job.ended - ended_s - (self._worker.busy_seconds - busy_s))

    def _commit_own(self, session: TargetSession, result: PlainResult, token: int) -> bool:
        """Commit a token of the target's own. Returns: whether another may follow in the same way at once."""
        state, shared = session.state, session.shared
        if shared.find_stop is None and state.phase is SessionPhase.UNDRAFTED and not result.likelihoods:
            commit = state.commit_own(token)
            self._note_commit(session, commit)
        else:
            is_resting = state.phase is SessionPhase.RESTING
            place = session.id, state.round, state.next_position
            verdict = Verdict(*place, 0, token, likelihoods=result.likelihoods, features=result.features)
            verdict = session.with_stop(verdict)
            commit = self._commit(session, verdict)
            if is_resting:
                self._tell_drafter(session, verdict, commit)
        shared.unsent = commit
        shared.deliver_nowait()
        if commit.finish_reason is not None:
            return False
        if shared.unsent is not None:
            session.is_blocked = True
        elif state.phase is SessionPhase.PROPOSING:
            self.begin_round(session)
            # Its drafter is about to propose, as after a verdict.
            session.ended_s, session.last_ready = self._worker.clock(), ReadyRound(1, is_row=session.is_row)
        else:
            return True
        return False

    def _commit(self, session: TargetSession, verdict: Verdict) -> Commit:
        """Commit the tokens of a verdict."""
        commit = session.state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        self._note_commit(session, commit)
        return commit

    def _note_commit(self, session: TargetSession, commit: Commit) -> None:
        self._note(session, "verdict", round=commit.round, num_tokens=commit.num_from_draft, commit=commit)

    def _tell_drafter(
        self, session: TargetSession, verdict: Verdict, commit: Commit, *, has_proposed: bool = False
    ) -> None:
        self._drafter.send_verdict(session, verdict, commit)
        # Not while a late drafter still has tokens to propose: it may be late because of which tokens it drew.
        if session.decodes_alone and not has_proposed:
            self._drafter.leave_behind(session)

    # --- on the worker's thread -------------------------------------------------------------------

    def _verify(self, parts: Sequence[Part]) -> list[Exception | None]:
        """Returns: for each part, the error that concerns its text alone, or None."""
        verify(self._model, parts)
        return [part.error for part in parts]

    # --- the results ------------------------------------------------------------------------------

    def _judged(self, parts: Sequence[Part], job: Job[Any]) -> None:
        """Apply the verdicts of a pass."""
        num_parts = len(parts)
        num_computed = self._num_rows([part.session for part in parts])
        num_rows = num_computed * max([part.num_tokens for part in parts])
        if self._is_typical([part.session for part in parts]):
            self._prices.observe_verify_pass(num_rows, job.began, job.ended)
        num_drafting = sum([bool(part.proposal.tokens) for part in parts])
        # The time that drafted tokens added to the pass is charged to the texts that had some.
        plain_s = min(job.seconds, self._prices.verify(num_computed)) if num_drafting > 0 else job.seconds
        added_s = (job.seconds - plain_s) / max(1, num_drafting)
        for part in parts:
            session = part.session
            session.shared.counts.wait(job.began - part.since_s)
            session.last_pass_s = plain_s / num_parts + (added_s if part.proposal.tokens else 0.0)
            session.drafting_share = num_drafting / num_parts
            session.pass_rounds, session.pass_rows = num_parts, num_rows
            session.ended_s, session.last_ready = job.ended, part.ready
            session.has_shared = session.has_shared or num_parts > 1
            if part.error is None:
                session.verify_seconds += job.seconds / num_parts
                session.goes_alone = False
                try:
                    self._apply(session, verdict_of(part, self._note))
                except Exception as error:  # of any kind: it ends this text, and the others go on
                    self.fail(session, error)
            elif not isinstance(part.error, CacheLostError):
                self.fail(session, job_error(job, part.error))

    def _apply(self, session: TargetSession, verdict: Verdict) -> None:
        """Commit the tokens of a verdict, and begin the next round."""
        if session.has_ended:
            return  # it ended while the pass ran
        proposal, is_drafted = session.state.outstanding, session.state.phase is not SessionPhase.UNDRAFTED
        verdict = session.with_stop(verdict)
        round_s = self._round_seconds(session)
        commit = self._commit(session, verdict)
        session.shared.unsent = commit
        if is_drafted:
            self._tell_drafter(session, verdict, commit, has_proposed=proposal is not None and bool(proposal.tokens))
        if commit.round > 0:  # the first round waits for the drafter's prefill
            if proposal is not None:
                self._prices.observe_round(len(commit.tokens), round_s)
            elif session.was_plain and session.pass_rounds == session.pass_rows == 1:
                # Not the first plain round after a proposal: it cannot be a pass ahead, and its cost is unavoidable.
                self._prices.observe_plain_round(round_s)
        session.was_plain = proposal is None
        self.begin_round(session)

    def _round_seconds(self, session: TargetSession) -> float:
        busy_s = self._worker.busy_seconds - session.busy_before_s
        idle_s = max(0.0, self._worker.clock() - session.round_began_s - busy_s)
        # Idle time is charged to the texts with drafts, too: plain decoding would have used it for a pass ahead.
        return session.last_pass_s + idle_s / (len(self.texts) * (session.drafting_share or 1.0))

    # --- failures ---------------------------------------------------------------------------------

    def _failed(
        self, sessions: Sequence[TargetSession], drafted: Sequence[TargetSession], error: JobError, *, is_alone: bool
    ) -> None:
        """Have a failed pass repeated: without drafted tokens, if it had some (`drafted`: the texts that they are of);
        else each text by itself. A text that was by itself has failed: it ends.

        Args:
            is_alone: whether the pass was of one text, and computed no other row of the batch.
        """
        if drafted:
            for session in drafted:
                if (overdue := session.drop_proposal()) is not None:
                    self._drafter.send(overdue)
        elif is_alone:
            for session in sessions:
                self.fail(session, error)
            self.most_rounds = self.max_batch  # the size was not the cause
        else:
            for session in sessions:
                session.goes_alone = True
            self.most_rounds = max(1, len(sessions) // 2)


def plain_row(session: TargetSession) -> PlainRow:
    """A text's row in a pass without drafts; `is_plain` must be true."""
    assert session.sequence is not None
    shared, committed = session.shared, session.state.committed
    if (row := session.plain_row) is None or row.sequence is not session.sequence:
        row = session.plain_row = PlainRow(session.sequence, shared.opened, shared.logits_pipeline)
    row.plan = session.cached_tokens.plan(committed, num_logits=0 if row.is_ahead else 1)
    if shared.logits_pipeline.needs_text:
        row.history = shared.logits_pipeline.history(committed)
    return row


def _num_tokens(parts: Sequence[Part]) -> int:
    return sum([part.num_tokens for part in parts])
