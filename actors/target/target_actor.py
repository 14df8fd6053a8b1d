"""The target: judges proposals, commits tokens, and decodes by itself when nobody drafts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from actors.actor import ModelActor
from actors.model import CacheLostError, Model
from actors.prefill import prefill_chunk
from actors.probe import PROBED, probe
from actors.session import Session
from actors.target.drafter_link import DrafterLink
from actors.target.pass_prices import PassPrices, num_computed_by, passes_in_a_row
from actors.target.passes import Passes, RowResult
from actors.target.reading import PromptReading
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Steps, Worker, job_error
from protocol.errors import OutriderError, ProtocolError, StreamFailedError
from protocol.messages import Close, Due, Features, Message, PromptFeatures, Proposal, Ready, Rest, Withdraw
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.pass_plan import PassLimit, ReadyRound, TargetView, Turn, next_pass
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Event, Share

BriefJob = Callable[[TargetSession], Awaitable[None]]


@attrs.define(eq=False)
class _Running:
    """The pass that runs, or several in a row over sessions without drafted tokens."""

    sessions: Sequence[TargetSession]
    shares: Sequence[Share]  # of the sessions, in the first pass
    ready_s: Sequence[float]  # when each became ready, in seconds on the worker's clock
    is_plain: bool  # whether no session has drafted tokens, so that a pass may launch the next one ahead
    num_left: int  # the most passes that are still to finish
    goes_ahead: bool  # whether the last of them launches one more pass ahead
    reads_prompt: bool  # whether it is one pass over the rest of a session's prompt
    steps: Steps[list[RowResult]] = attrs.field(init=False)  # the passes, for the worker
    is_first: bool = True  # whether no pass has finished yet
    # The sessions that can take part in another such pass, as of the last one that finished.
    going_on: list[TargetSession] = attrs.field(factory=list)


class TargetActor(ModelActor[TargetSession]):
    """Verifies proposals. The rounds that are ready when the model becomes free share a forward pass.

    A session goes through these steps, each a job of the loop: open its cache, read its prompt, hand the prompt's
    features to a drafter, run the rounds, close the cache. All but reading and rounds take almost no time and are done
    first (`_brief_jobs`). `protocol.pass_plan.next_pass` decides which pass is next.
    """

    name = "target"

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        on_failure: Callable[[OutriderError], None],
        target_queue: TargetQueue,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        max_batch: int = MAX_BATCH,
    ) -> None:
        """As `ModelActor`. `on_failure` is called when the model itself has failed, so that no session can go on.
        `target_queue` shows the drafter the passes that wait and run here. At most `max_batch` sessions share one pass.
        """
        super().__init__(
            model, worker, on_event, prices, pass_price=prices.verify, prefix_cache_bytes=prefix_cache_bytes
        )
        self._on_failure = on_failure
        self._target_queue = target_queue
        # The link to the drafter, which is missing until `DrafterLink.attach`.
        self.drafter = DrafterLink(lambda: len(self._sessions), prices, partial(self._note, kind="overdue"))
        self.max_batch = max_batch
        self._pass_limit = PassLimit(max_batch)
        self._passes = Passes(model)
        self._pass_prices = PassPrices(prices, worker)
        self._running: _Running | None = None
        self._texts: dict[int, TargetSession] = {}  # whose rounds are run, by id
        self._reading = PromptReading(model, worker, self.chunk_size, max_batch, self._begin_text)
        self._brief_jobs: dict[TargetSession, BriefJob] = {}
        # A session whose prompt is read is in `_ready` if its next round can begin, in the order in which they became
        # ready, else in `_waiting`, for its drafter or consumer.
        self._ready: dict[TargetSession, Turn] = {}
        self._waiting: dict[TargetSession, None] = {}
        self._idle_since_s = self._hurried_until_s = -math.inf

    def _hand_over(self, message: Message) -> None:
        super()._hand_over(message)
        if (session := self._sessions.get(message.session)) is not None:
            self._look_at(session)

    def _receive(self, session: TargetSession, message: Message) -> None:
        match message:
            case Proposal():
                if not session.state.propose(message):
                    session.shared.counts.stale_proposals += 1
            case Ready():
                session.is_drafter_ready, session.decodes_alone = True, False
            case Rest():
                session.state.rest(message)
            case Withdraw():
                session.state.withdraw(message)
            case _:
                raise ProtocolError(f"the target cannot handle {message!r}")

    def _new_session(self, shared: Session) -> TargetSession:
        session = TargetSession(shared)
        # A text to score is opened as drafted ones are, so that each can reuse the other's cached prefix.
        session.alongside_model = self.drafter.has_model and (shared.opened.drafted or shared.opened.num_scored > 0)
        return session

    def _look_at(self, session: TargetSession) -> None:
        super()._look_at(session)
        if self._running is not None:
            self._running.steps.interrupt()  # there may be other work than a pass without drafts

    # --- the loop ---------------------------------------------------------------------------------

    async def _turn(self) -> None:
        self._take_in()
        await self._give_up_prefixes()
        if self._brief_jobs:
            session = next(iter(self._brief_jobs))
            await self._run_brief_job(session, self._brief_jobs.pop(session))
            return
        view, until_s = self._view()
        job, texts = next_pass(view), list(self._ready)
        chosen = [texts[index] for index in job.num_drafted]
        match job.kind:
            case "wait":
                self._hurry([list(self._waiting)[index] for index in job.hurried], view.now_s + job.wait_s)
                self._deliver()
                self._pass_prices.pause()
                await self._wait(max(0.0, min(job.wait_s, until_s - view.now_s)))
                return
            case "prompts":
                await self._read_prompts()
            case "again":
                await self._read_again(chosen[0])
            case "plain":
                await self._decode(chosen, view)
            case "verify":
                await self._verify(chosen, list(job.num_drafted.values()))
        self._idle_since_s = self.worker.clock()

    def _take_in(self) -> None:
        while self._changed:
            changed, self._changed = self._changed, {}
            for session in changed:
                if session.id in self._sessions:
                    self._take_in_one(session)

    def _take_in_one(self, session: TargetSession) -> None:
        if session.has_ended:
            self._brief_jobs[session] = self._let_go
        elif session.has_read_prompt and session.shared.opened.only_reads:
            self._keep_prompt(session)
        elif session.sequence is None:
            if self._may_open(session):
                self._brief_jobs[session] = self._open
        elif session.id in self._texts:
            self._take_in_round(session)
        elif session.num_to_read > 0:
            self._reading.prompts.setdefault(session)
        elif not session.has_read_prompt:
            self._brief_jobs[session] = self._end_prompt
        else:
            session.state.close(Close(session.id))
            self._brief_jobs[session] = self._let_go

    def _keep_prompt(self, session: TargetSession) -> None:
        """Keep a prompt in the prefix cache, and end its session once a drafter, which may hang, has read it."""
        if session.sequence is not None:
            self._brief_jobs[session] = self._put_away
            return
        session.shared.end()
        if session.is_drafter_ready or session.state.phase is not SessionPhase.PROPOSING:
            self._brief_jobs[session] = self._let_go

    def _take_in_round(self, session: TargetSession) -> None:
        if (turn := self._ready.get(session)) is not None:
            if not turn.is_plain or session.is_plain():
                return
            del self._ready[session]
        self._waiting[session] = None
        was_blocked, session.is_blocked = session.is_blocked, session.shared.is_blocked
        if session.is_blocked:
            session.awaits_proposal_since_s = None
            return
        if was_blocked:
            session.begin_round(self.worker)
        if session.state.phase is SessionPhase.PROPOSING:
            self._await_proposal(session)
        else:
            self._make_ready(session)

    def _await_proposal(self, session: TargetSession) -> None:
        if session.awaits_proposal_since_s is None:
            session.awaits_proposal_since_s = self.worker.clock()
            session.was_asked = False
        # Computed each time, since it depends on whether the drafter is ready.
        session.proposal_due_s = session.awaits_proposal_since_s + self.drafter.timeout_s(session)

    def _make_ready(self, session: TargetSession) -> None:
        now_s = self.worker.clock()
        session.awaits_proposal_since_s, session.was_hurried = None, False
        if session.ended_s is not None:
            session.turnaround_s.observe(now_s - session.ended_s)
            session.ended_s = None
        self._set_num_texts()
        is_plain, lookahead = session.is_plain(), session.settings.lookahead
        if (round := self._plan(session)) is None:
            return
        if is_plain:
            turn = Turn(round, lookahead, is_plain=True, is_ahead=session.is_ahead, since_s=now_s)
        else:
            turn = Turn(round, lookahead, is_alone=session.goes_alone, since_s=now_s)
            self._target_queue.enter(session.id, round.max_width)
        del self._waiting[session]
        self._ready[session] = turn

    def _plan(self, session: TargetSession) -> ReadyRound | None:
        """Plan a session's part in the next pass; None if that fails, which ends this session only."""
        try:
            return session.plan_pass(self.prices)
        except Exception as error:  # of any kind
            self._end(session, error)
            return None

    def _set_num_texts(self) -> None:
        num_texts = len(self._texts)
        self._pass_limit.settle(num_texts)
        self.prices.num_texts = max(1, min(num_texts, self._pass_limit.most))

    def _view(self) -> tuple[TargetView, float]:
        """What the target could do, and when to look again, in seconds on the worker's clock."""
        now_s = self.worker.clock()
        until_s = self._time_out(now_s)
        self._take_in()
        if others := [(session, turn) for session, turn in self._ready.items() if not turn.is_plain]:
            self._set_num_texts()
            for session, turn in others:
                if session.has_lost_tokens():
                    self._ready[session] = attrs.evolve(turn, reads_again=True)
        view = TargetView(
            list(self._ready.values()),
            [session.expected(can_hurry=self.drafter.can_hurry(session)) for session in self._waiting],
            self.prices,
            now_s,
            has_prompts=bool(self._reading.prompts and self._reading.wanted),
            most_shared=self.max_batch,
            max_batch=self._pass_limit.most,
            idle_since_s=self._idle_since_s,
            hurried_until_s=self._hurried_until_s,
        )
        return view, until_s

    def _time_out(self, now_s: float) -> float:
        """Stop waiting for proposals that are overdue. Returns: when the next one will be."""
        next_s = math.inf
        for session in self._waiting:
            if session.awaits_proposal_since_s is None or session.was_asked:
                continue
            if session.proposal_due_s <= now_s:
                self._await_proposal(session)
            if session.proposal_due_s <= now_s:
                session.was_asked = True
                self.drafter.time_out(session)
                self._look_at(session)
            else:
                next_s = min(next_s, session.proposal_due_s)
        return next_s

    def _hurry(self, sessions: Sequence[TargetSession], until_s: float) -> None:
        for session in sessions:
            self.drafter.send(Due(session.id, session.state.round, is_late=False))
            session.was_hurried = True
            self._hurried_until_s = until_s
        if sessions:
            self._exchange()

    def _exchange(self) -> None:
        """Have a drafter in this process answer what it was sent, and take in its answers, before anything else runs: a
        thread that builds a pass may take Python's lock at each switch between tasks.
        """
        self.drafter.take_messages()
        self.take_messages()

    # --- passes -----------------------------------------------------------------------------------

    async def _read_prompts(self) -> None:
        self._target_queue.begin_reading()
        self.chunk_size.leaves_out_next = any(session.is_ahead for session in self._texts.values())
        try:
            for session in await self._reading.run():
                self._look_at(session)
            self._wake_waiting()
        finally:
            self._target_queue.end_reading(self.worker.clock())
        # Each text that is ready now has one turn before another chunk is read.
        self._take_in()
        for session, turn in self._ready.items():
            self._ready[session] = attrs.evolve(turn, is_due=True)

    async def _begin_text(self, session: TargetSession) -> None:
        """Read what is left of a prompt in the pass that gives the text's first token, without a proposal."""
        await self._run_brief_job(session, self._end_prompt)
        may_begin = session.is_plain() and not (session.has_ended or session.shared.is_blocked)
        if may_begin and self._plan(session) is not None:
            await self._run([session], [self.worker.clock()], 1, reads_prompt=True)

    async def _decode(self, sessions: Sequence[TargetSession], view: TargetView) -> None:
        are_all = view.all_are_plain and len(sessions) == len(view.turns)
        num_rounds = min(session.num_plain_rounds for session in sessions)
        # A pass ahead would only delay a chunk of a prompt, which comes next.
        goes_ahead = (view.most_shared == 1 or are_all) and num_rounds > 1 and not view.has_prompts
        goes_ahead = goes_ahead and self._pass_prices.may_go_ahead(len(sessions))
        num_passes = 1
        if goes_ahead and are_all:
            num_passes = passes_in_a_row(sessions, num_rounds)
        for session in sessions:
            del self._ready[session]
        planned = [session for session in sessions if self._plan(session) is not None]
        going_on: dict[TargetSession, None] = {}
        if planned:
            ready_s = [session.round_began_s for session in planned]
            goes_ahead = goes_ahead and num_rounds > num_passes
            going_on = dict.fromkeys(await self._run(planned, ready_s, num_passes, goes_ahead=goes_ahead))
        if len(going_on) < len(sessions):
            for session in sessions:
                if session not in going_on:
                    self._look_at(session)
        self._take_in()  # sessions that became ready during the pass come first
        for session in going_on:
            if session not in self._ready and session not in self._waiting and not session.has_ended:
                round, now_s = ReadyRound(1, is_row=session.is_row), self.worker.clock()
                lookahead, is_ahead = session.settings.lookahead, session.is_ahead
                self._ready[session] = Turn(round, lookahead, is_plain=True, is_ahead=is_ahead, since_s=now_s)

    async def _verify(self, sessions: Sequence[TargetSession], num_drafted: Sequence[int]) -> None:
        planned, ready_s = [], []
        for session, number in zip(sessions, num_drafted, strict=True):
            turn = self._ready.pop(session)
            round: ReadyRound | None = turn.round
            if turn.is_plain:
                round = self._plan(session) if session.is_plain() else None
                if round is not None:
                    self._target_queue.enter(session.id, turn.round.num_needed)
            if round is None or session.row is None:
                continue  # it has ended, or its cache was lost
            if round.reach and session.row.proposal is not None:
                session.row.proposal = session.row.proposal.cut(number)
            session.last_ready = round
            planned.append(session)
            ready_s.append(turn.since_s)
        if planned:
            began_s = self.worker.clock()
            await self._run(planned, ready_s)
            for session, turn in self._ready.items():
                if turn.since_s < began_s and not turn.round.was_passed_over:
                    self._ready[session] = attrs.evolve(turn, round=attrs.evolve(turn.round, was_passed_over=True))
        for session in sessions:
            self._look_at(session)

    async def _run(
        self,
        sessions: Sequence[TargetSession],
        ready_s: Sequence[float],
        num_passes: int = 0,
        *,
        goes_ahead: bool = False,
        reads_prompt: bool = False,
    ) -> list[TargetSession]:
        """Run the next pass over sessions that became ready at `ready_s`; or up to `num_passes` without drafted tokens
        in a row, until something changes, the last of which may launch one more.

        Returns: after passes without drafted tokens, the sessions that can take part in another at once, in order.
        """
        shares = [Share(session.id, session.state.round, session.num_planned) for session in sessions]
        is_plain, num_passes = num_passes > 0, max(1, num_passes)
        if is_plain:
            for share in shares:
                self._target_queue.enter(share.session, share.num_tokens)
        running = _Running(sessions, shares, ready_s, is_plain, num_passes, goes_ahead, reads_prompt)
        rows = [row for session in sessions if (row := session.row) is not None]
        first = partial(self._passes.steps, rows, tuple(shares), num_passes, goes_ahead=goes_ahead)
        num_tokens = sum([share.num_tokens for share in shares])
        running.steps = steps = Steps("verify", first, partial(self._passed, running), num_tokens=num_tokens)
        if not is_plain:
            steps.count = lambda _: sum([row.num_tokens for row in rows])
        if len(sessions) == 1:
            steps.kind = "prefill" if reads_prompt else "decode" if is_plain else "verify"
            steps.session, steps.round = sessions[0].id, sessions[0].state.round
        else:
            steps.shares = tuple(shares)
        # A row of the batch is not alone: the others are computed in any case.
        is_alone = len(sessions) == 1 and (rows[0].alone or not sessions[0].is_row)
        self._begin_job(sessions)
        self._pass_prices.begin_pass(is_plain=is_plain)
        self._running = running
        try:
            await self.worker.run_steps(steps, meanwhile=self._deliver)
        except JobError as error:
            running.going_on = []
            self._pass_prices.forget()
            self._pass_failed([session for session in sessions if not session.has_ended], error, is_alone=is_alone)
        finally:
            self._running = None
            self._end_job(sessions)
        return running.going_on

    def _passed(self, running: _Running, job: Job[Any], results: Sequence[RowResult], goes_on: bool) -> None:
        """Apply the results of a pass. The next one may be running already."""
        sessions, num_texts = running.sessions, len(self._texts)
        running.num_left -= 1
        num_computed = num_computed_by(sessions, self._texts.values()) if num_texts > 1 else 1
        if running.reads_prompt:
            self.chunk_size.observe(job.num_tokens, job.seconds)
        elif running.is_plain:
            is_ahead = running.num_left > 0 or running.goes_ahead
            width = max([share.num_tokens for share in running.shares]) if running.is_first else 1
            self._pass_prices.learn_plain(job, sessions, num_texts, num_computed * width, is_ahead=is_ahead)
        else:
            width = max([session.row.num_tokens for session in sessions if session.row is not None], default=1)
            self._pass_prices.learn_verified(job, sessions, num_texts, num_computed, width)
        running.is_first, running.going_on = False, []
        if self._pass_limit.most < self.max_batch:
            self._pass_limit.count_pass()
        for session, ready_s, result in zip(sessions, running.ready_s, results, strict=True):
            session.shared.counts.wait(job.began - ready_s)
            session.has_shared = session.has_shared or len(sessions) > 1
            if (running.is_plain or result.error is None) and not running.reads_prompt:
                session.verify_seconds += job.seconds / len(sessions)
            if running.is_plain:
                session.round_began_s, session.busy_before_s = job.ended, self.worker.busy_seconds
            else:
                session.ended_s = job.ended
            try:
                if self._apply(session, job, result, is_plain=running.is_plain):
                    running.going_on.append(session)
            except Exception as error:  # of any kind: it ends this session, and the others go on
                self._end(session, error)
        running.ready_s = [job.ended] * len(sessions)
        if len(sessions) == 1:
            running.steps.round = sessions[0].state.round
        if len(running.going_on) < len(sessions):
            running.steps.interrupt()
        if goes_on and self.drafter.mailbox is not None:  # nobody else asks how long the queue is
            self._target_queue.begin_again(job.ended)
        if not running.is_plain:
            # Before the task that waits for the pass goes on: the drafter's loop may run first.
            self._end_job(sessions)
            self._exchange()

    def _apply(self, session: TargetSession, job: Job[Any], result: RowResult, *, is_plain: bool) -> bool:
        """Apply a session's result of a pass. Returns: whether another pass without drafts may follow at once."""
        if num_dropped := session.follow(result):
            self._note(session, "rewind", num_tokens=num_dropped)
        if isinstance(result.error, CacheLostError):
            return False  # the tokens that its cache has lost are read again
        if session.has_ended:  # while the pass ran
            session.is_broken = session.is_broken or result.error is not None
            return False
        if result.error is not None:
            self._end(session, job_error(job, result.error))
            return False
        session.goes_alone = False
        was_proposed = session.state.outstanding is not None
        round_s = 0.0 if is_plain else self._pass_prices.round_s(session, len(self._texts))
        commit = self._commit(session, result)
        if not is_plain and commit.round > 0:  # the first round waits for the drafter's prefill
            self._pass_prices.learn_round(session, len(commit.tokens), round_s, was_proposed=was_proposed)
        session.was_plain = not was_proposed
        session.shared.unsent = commit
        session.shared.note_length(len(session.state.committed))
        if not is_plain:
            session.begin_round(self.worker)
            return False
        session.shared.deliver_nowait()
        if commit.finish_reason is not None:
            return False
        if session.shared.unsent is not None or session.shared.awaits_memory:
            session.is_blocked = True
        elif session.state.phase is SessionPhase.PROPOSING:
            session.begin_round(self.worker)
            # Its drafter is about to propose, as after a verdict.
            session.ended_s, session.last_ready = self.worker.clock(), ReadyRound(1, is_row=session.is_row)
        else:
            return True
        return False

    def _commit(self, session: TargetSession, result: RowResult) -> Commit:
        state, verdict = session.state, session.verdict(result)
        is_drafted, proposal = state.phase is not SessionPhase.UNDRAFTED, state.outstanding
        commit = state.apply(verdict)
        if commit is None:
            raise ProtocolError(f"the target's own {verdict!r} was stale")
        if (limit := session.shared.reasoning_limit) is not None:
            limit.follow(state.committed)
        if is_drafted:
            self.drafter.send_verdict(session, verdict, commit)
            # Not while a late drafter still has tokens to propose: it may be late because of which tokens it drew.
            if session.decodes_alone and not (proposal and proposal.tokens):
                self.drafter.leave_behind(session)
        self._note(session, "verdict", round=commit.round, num_tokens=commit.num_from_draft, commit=commit)
        return commit

    def _pass_failed(self, sessions: Sequence[TargetSession], error: JobError, *, is_alone: bool) -> None:
        """Have a failed pass over sessions that have not ended repeated: without drafted tokens if it had some, else
        each session by itself. One that was by itself (`is_alone`: no other row of the batch was computed) ends.
        """
        if drafted := [session for session in sessions if session.row is not None and session.row.feeds_drafted]:
            for session in drafted:
                if (overdue := session.drop_proposal()) is not None:
                    self.drafter.send(overdue)
        elif is_alone:
            for session in sessions:
                self._end(session, error)
            self._pass_limit.lift()
        else:
            for session in sessions:
                session.goes_alone = True
            self._pass_limit.fail(len(sessions))

    async def _read_again(self, session: TargetSession) -> None:
        del self._ready[session]
        self._begin_job([session])
        try:
            await prefill_chunk(self.worker, session, session.state.committed[:-1], self.chunk_size)
        except JobError as error:
            self._end(session, error)
        finally:
            self._end_job([session])
        self._look_at(session)

    def _begin_job(self, sessions: Collection[TargetSession]) -> None:
        self._target_queue.begin([session.id for session in sessions], self.worker.clock())

    def _end_job(self, sessions: Collection[TargetSession]) -> None:
        now_s = self.worker.clock()
        for session in sessions:
            self._target_queue.leave(session.id, now_s)

    def _deliver(self) -> None:
        for session in self._texts.values():
            session.shared.deliver_nowait()
            if session.is_blocked and not session.shared.is_blocked:
                # Its consumer has taken a commit, but has not called `make_room` yet.
                self._look_at(session)

    def _end(self, session: TargetSession, error: Exception) -> None:
        session.failure = session.failure or error
        self._look_at(session)

    # --- before and after the rounds ----------------------------------------------------------------

    async def _run_brief_job(self, session: TargetSession, job: BriefJob) -> None:
        try:
            await job(session)
        except Exception as error:  # of any kind: it ends this session, and the others go on
            self._end(session, error)
        self._look_at(session)

    async def _open(self, session: TargetSession) -> None:
        hit = await self._open_sequence(session)
        if (features := hit.sequence.features) is not None:
            features.want(session.state.phase is not SessionPhase.UNDRAFTED)
        counts = session.shared.counts
        counts.cached_tokens, counts.parted_tokens = hit.num_cached, hit.num_common - hit.num_cached
        counts.mismatched_tokens, counts.evicted_tokens = hit.num_mismatched, hit.num_evicted
        session.reads_until = session.shared.opened.num_read

    def give_way(self, shared: Session, on_done: Callable[[], None]) -> None:
        """Empty the cache of a text that waits for memory, to be read again, and call `on_done`. Never waits."""
        if (session := self._sessions.get(shared.opened.session)) is not None and not session.has_ended:
            self._brief_jobs[session] = partial(self._give_way, on_done)
            self._wakeup.set()

    async def _give_way(self, on_done: Callable[[], None], session: TargetSession) -> None:
        if not session.shared.awaits_memory:
            return
        await self._empty_sequence(session)
        on_done()

    async def _end_prompt(self, session: TargetSession) -> None:
        opened, session.has_read_prompt = session.shared.opened, True
        await self._give_prompt_features(session)
        if opened.num_scored > 0:
            session.reads_until = len(opened.prompt) - 1
        elif not opened.only_reads:
            self._texts[session.id] = session
            session.shared.on_change = partial(self._look_at, session)
            session.begin_round(self.worker)

    async def _give_prompt_features(self, session: TargetSession) -> None:
        """Send the prompt's features, as far as it is read, to a drafter that reads features."""
        if self.drafter.mailbox is None or not session.shared.opened.drafted:
            return
        assert session.sequence is not None
        taken: Features | None = None
        if (features := session.sequence.features) is not None and features.arrays():
            call = partial(features.take, len(session.cached_tokens))
            taken = await self.worker.run(Job("prefill", call, session.id))
        if taken is not None or (features is not None and self.drafter.has_model and session.num_to_read <= 0):
            self.drafter.send(PromptFeatures(session.id, taken))

    async def _let_go(self, session: TargetSession) -> None:
        self._brief_jobs.pop(session, None)
        self._reading.prompts.pop(session, None)
        self._waiting.pop(session, None)
        if self._ready.pop(session, None) is not None:
            self._target_queue.leave(session.id, self.worker.clock())
        self._texts.pop(session.id, None)
        self._set_num_texts()
        shared, error = session.shared, session.failure
        shared.on_change = None
        session.is_broken = session.is_broken or error is not None
        if error is None and session.state.finish_reason is not None:
            # The consumer takes an unsent commit from `shared` later: waiting for it would delay other sessions.
            shared.deliver_nowait()
            self._note(session, "finish")
        try:
            await self._put_away(session)
        except JobError as of_closing:
            error = error or of_closing
        if isinstance(error, JobError):
            await self._end_or_break(session, error)
        elif error is not None:
            self._fail(session, error)
        shared.end()
        # A failed session must not keep the drafter busy until its consumer reads the error, and nobody else closes one
        # that only reads.
        if session.state.phase is not SessionPhase.CLOSED:
            self.drafter.send(Close(session.id))
        self._forget(session)

    async def _end_or_break(self, session: TargetSession, error: JobError) -> None:
        """End a session one of whose jobs failed, and the whole runtime if the model no longer works.

        A prompt that does not fit into memory, or a processor, may have caused it. So the model is probed.
        """
        cause = error.__cause__
        if isinstance(cause, OutriderError):
            session.shared.end(cause)
            return
        try:
            # Even if nobody wants this session any more: the result matters to the others.
            with trio.CancelScope(shield=True):
                await self.worker.run(Job("probe", partial(probe, self.model), None, len(PROBED)))
        except JobError:
            self._on_failure(error)
        else:
            self._fail(session, cause or error)

    def _fail(self, session: TargetSession, error: BaseException) -> None:
        session.failure = session.failure or (error if isinstance(error, Exception) else None)
        if isinstance(error, OutriderError):
            session.shared.end(error)
            return
        failure = StreamFailedError(
            f"this stream failed, and no other: {type(error).__name__}: {error}; the model itself works"
        )
        failure.__cause__ = error
        session.shared.end(failure)
