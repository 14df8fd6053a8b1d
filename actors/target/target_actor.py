"""The target: judges proposals, commits tokens, and decodes by itself when nobody drafts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio

from actors.actor import ModelActor
from actors.model import Model
from actors.probe import PROBED, probe
from actors.session import Session
from actors.target.drafter_link import DrafterLink
from actors.target.parts import Part, has_lost_tokens, is_plain, next_part
from actors.target.reading import Reading
from actors.target.round_jobs import RoundJobs
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import OutriderError, StreamFailedError
from protocol.messages import Close, Message, PromptFeatures
from protocol.open_options import MAX_BATCH, PREFIX_CACHE_BYTES
from protocol.pass_plan import Expected, ReadyRound, TargetView, Turn, next_pass
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.target_queue import TargetQueue
from protocol.trace import Event

Errand = Callable[[TargetSession], Awaitable[None]]


class TargetActor(ModelActor[TargetSession]):
    """Verifies proposals. The rounds that are ready when the model becomes free share a forward pass.

    A session goes through these steps, each a job of the loop: open its cache, read its prompt, hand the read prompt to
    whoever waits for it, run the rounds, close the cache. Opening, handing on and closing take almost no time and are
    done first (`_errands`). `protocol.pass_plan.next_pass` decides which pass is next.

    Attributes:
        drafter: the link to the drafter, which is missing until `DrafterLink.attach`.
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
        """As `ModelActor`, and:

        Args:
            on_failure: called when the model itself has failed, so that no session can go on.
            target_queue: the passes that wait and run here, for the drafter to see.
            max_batch: most sessions that share one pass, >= 1.
        """
        super().__init__(
            model, worker, on_event, prices, pass_price=prices.verify, prefix_cache_bytes=prefix_cache_bytes
        )
        self._on_failure = on_failure
        self._target_queue = target_queue
        self.drafter = DrafterLink(lambda: len(self._sessions), prices, partial(self._note, kind="overdue"))
        self._jobs = RoundJobs(
            model,
            worker,
            prices,
            target_queue,
            self.drafter,
            self.chunk_size,
            max_batch,
            look_at=self._look_at,
            note=self._note,
        )
        self._reading = Reading(model, worker, self.chunk_size, max_batch)
        self._errands: dict[TargetSession, Errand] = {}
        # A text whose prompt is read is in `_ready` if its next round can begin, in the order in which texts became
        # ready (with its part in `_parts` unless the round is plain), else in `_waiting`, for its drafter or consumer.
        self._ready: dict[TargetSession, Turn] = {}
        self._parts: dict[TargetSession, Part] = {}
        self._waiting: dict[TargetSession, None] = {}
        self._idle_since_s = self._hurried_until_s = -math.inf

    def _hand_over(self, message: Message) -> None:
        super()._hand_over(message)
        if (session := self._sessions.get(message.session)) is not None:
            self._look_at(session)

    def _receive(self, session: TargetSession, message: Message) -> None:
        session.receive(message)

    def _new_session(self, shared: Session) -> TargetSession:
        session = TargetSession(shared)
        # A text to score is opened as drafted ones are, so that each can reuse the other's cached prefix.
        session.beside_another = self.drafter.has_model and (shared.opened.drafted or shared.opened.num_scored > 0)
        return session

    def _look_at(self, session: TargetSession) -> None:
        super()._look_at(session)
        self._jobs.interrupt()

    # --- the loop ---------------------------------------------------------------------------------

    async def _turn(self) -> None:
        self._take_in()
        if self._errands:
            session = next(iter(self._errands))
            await self._run_errand(session, self._errands.pop(session))
            return
        view, until_s = self._view()
        job, texts = next_pass(view), list(self._ready)
        chosen = [texts[index] for index in job.num_drafted]
        match job.kind:
            case "wait":
                self._hurry([list(self._waiting)[index] for index in job.hurried], view.now_s + job.wait_s)
                self._jobs.deliver()
                self._jobs.pause()
                await self._wait(max(0.0, min(job.wait_s, until_s - view.now_s)))
                return
            case "prompts":
                await self._read_prompts()
            case "again":
                await self._read_again(chosen[0])
            case "plain":
                await self._decode_plainly(chosen, view)
            case "verify":
                await self._verify(chosen, list(job.num_drafted.values()))
        self._idle_since_s = self.worker.clock()

    def _take_in(self) -> None:
        """Look at the sessions that have changed."""
        while self._changed:
            changed, self._changed = self._changed, {}
            for session in changed:
                if session.id in self._sessions:
                    self._take_in_one(session)

    def _take_in_one(self, session: TargetSession) -> None:
        if session.has_ended:
            self._errands[session] = self._let_go
        elif session.sequence is None:
            if self._may_open(session):
                self._errands[session] = self._open
        elif session.id in self._jobs.texts:
            self._take_in_round(session)
        elif session.num_to_read > 0:
            self._reading.prompts.setdefault(session)
        elif not session.has_read_prompt:
            self._errands[session] = self._end_prompt
        else:
            session.state.close(Close(session.id))
            self._errands[session] = self._let_go

    def _take_in_round(self, session: TargetSession) -> None:
        if (turn := self._ready.get(session)) is not None:
            if not turn.is_plain or is_plain(session):
                return
            self._take(session)
        self._waiting[session] = None
        was_blocked, session.is_blocked = session.is_blocked, session.shared.is_blocked
        if session.is_blocked:
            session.awaits_proposal_since_s = None
            return
        if was_blocked:
            self._jobs.begin_round(session)
        if session.state.phase is SessionPhase.PROPOSING:
            self._await_proposal(session)
        else:
            self._make_ready(session)

    def _await_proposal(self, session: TargetSession) -> None:
        if session.awaits_proposal_since_s is None:
            session.awaits_proposal_since_s = self.worker.clock()
            session.was_asked = False
        # Computed anew each time, since it depends on whether the drafter is ready.
        session.proposal_due_s = session.awaits_proposal_since_s + self.drafter.timeout_s(session)

    def _make_ready(self, session: TargetSession) -> None:
        now_s = self.worker.clock()
        session.awaits_proposal_since_s, session.was_hurried = None, False
        assert session.sequence is not None
        if (features := session.sequence.features) is not None:
            features.want(session.state.phase is not SessionPhase.UNDRAFTED)
        if session.ended_s is not None:
            session.turnaround_s.observe(now_s - session.ended_s)
            session.ended_s = None
        self._set_num_texts()
        if is_plain(session):
            num_needed = max(1, len(session.state.committed) - len(session.cached_tokens))
            is_ahead = session.plain_row is not None and session.plain_row.is_ahead
            round = ReadyRound(num_needed, is_row=session.is_row)
            turn = Turn(round, is_plain=True, is_ahead=is_ahead, since_s=now_s)
        else:
            if (part := self._make_part(session, now_s)) is None:
                return
            self._parts[session] = part
            lookahead = session.state.opened.settings.lookahead
            turn = Turn(part.ready, lookahead, is_alone=part.alone, since_s=now_s)
            self._target_queue.enter(session.id, part.ready.max_width)
        del self._waiting[session]
        self._ready[session] = turn

    def _set_num_texts(self) -> None:
        num_texts = len(self._jobs.texts)
        if num_texts <= self._jobs.most_rounds:
            self._jobs.most_rounds = self._jobs.max_batch
        self.prices.num_texts = max(1, min(num_texts, self._jobs.most_rounds))

    def _view(self) -> tuple[TargetView, float]:
        """What the target could do, and when to look again, in seconds on the worker's clock."""
        now_s = self.worker.clock()
        until_s = self._time_out(now_s)
        self._take_in()
        for session in self._parts:
            if has_lost_tokens(session):
                self._ready[session] = attrs.evolve(self._ready[session], reads_again=True)
        if self._parts:
            self._set_num_texts()
        view = TargetView(
            list(self._ready.values()),
            [self._expected(session) for session in self._waiting],
            self.prices,
            now_s,
            has_prompts=bool(self._reading.wanted),
            most_shared=self._jobs.max_batch,
            max_batch=self._jobs.most_rounds,
            idle_since_s=self._idle_since_s,
            hurried_until_s=self._hurried_until_s,
        )
        return view, until_s

    def _expected(self, session: TargetSession) -> Expected:
        awaits_drafter = session.awaits_proposal_since_s is not None
        return Expected(
            awaits_drafter,
            session.is_drafter_ready,
            session.state.opened.settings.lookahead,
            None if session.ended_s is None else session.last_ready,
            0.0 if session.ended_s is None else session.ended_s + session.turnaround_s.value,
            can_hurry=awaits_drafter and self.drafter.can_hurry(session),
            was_hurried=session.was_hurried,
            is_row=session.is_row,
        )

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
            self.drafter.hurry(session)
            session.was_hurried = True
            self._hurried_until_s = until_s
        if sessions:
            self._exchange()

    def _exchange(self) -> None:
        """Have a drafter in this process answer what it was sent, and take in its answers, before anything else runs: a
        thread that builds a pass may take Python's lock at each switch between tasks.
        """
        self.drafter.exchange()
        self.take_messages()

    # --- passes -----------------------------------------------------------------------------------

    async def _read_prompts(self) -> None:
        self._target_queue.begin_reading()
        try:
            for session in await self._reading.run():
                self._look_at(session)
        finally:
            self._target_queue.end_reading(self.worker.clock())
        # Each text that is ready now has one turn before another chunk is read.
        self._take_in()
        for session, turn in self._ready.items():
            self._ready[session] = attrs.evolve(turn, is_due=True)

    async def _decode_plainly(self, texts: Sequence[TargetSession], view: TargetView) -> None:
        """Decode texts that nobody drafts for, in one pass or several in a row."""
        are_all = view.all_are_plain and len(texts) == len(view.turns)
        goes_ahead = view.most_shared == 1 or are_all
        for session in texts:
            del self._ready[session]
        may_repeat = are_all and not view.has_prompts
        going_on = dict.fromkeys(await self._jobs.run_plain_passes(texts, goes_ahead=goes_ahead, may_repeat=may_repeat))
        if len(going_on) < len(texts):
            for session in texts:
                if session not in going_on:
                    self._look_at(session)
        self._take_in()  # texts that became ready during the pass come first
        for session in going_on:
            assert session.plain_row is not None
            round, is_ahead = ReadyRound(1, is_row=session.is_row), session.plain_row.is_ahead
            turn = Turn(round, is_plain=True, is_ahead=is_ahead, since_s=self.worker.clock())
            if session not in self._ready and session not in self._waiting and not session.has_ended:
                self._ready[session] = turn

    async def _verify(self, texts: Sequence[TargetSession], num_drafted: Sequence[int]) -> None:
        """Run a pass over texts, some of which have proposals."""
        parts = []
        for session, number in zip(texts, num_drafted, strict=True):
            turn, part = self._take(session)
            if part is None and is_plain(session):
                self._target_queue.enter(session.id, turn.round.num_needed)
                part = self._make_part(session, turn.since_s)
            if part is not None:
                part.cut(number)
                parts.append(part)
        if parts:
            await self._jobs.run_pass(parts)
            self._exchange()
            for session, turn in self._ready.items():
                if turn.since_s < self._jobs.pass_began_s and not turn.round.was_passed_over:
                    self._ready[session] = attrs.evolve(turn, round=attrs.evolve(turn.round, was_passed_over=True))
        for session in texts:
            self._look_at(session)

    async def _read_again(self, session: TargetSession) -> None:
        self._take(session)
        await self._jobs.read_again(session)
        self._look_at(session)

    def _make_part(self, session: TargetSession, since_s: float) -> Part | None:
        """A text's part in the next pass; None if it cannot be made, which ends this text only."""
        try:
            return next_part(session, self.prices, since_s)
        except Exception as error:  # of any kind
            self._jobs.fail(session, error)
            return None

    def _take(self, session: TargetSession) -> tuple[Turn, Part | None]:
        """Remove a text from those that are ready. Returns: its turn, and its part unless the round is plain."""
        return self._ready.pop(session), self._parts.pop(session, None)

    # --- before and after the rounds ----------------------------------------------------------------

    async def _run_errand(self, session: TargetSession, errand: Errand) -> None:
        try:
            await errand(session)
        except Exception as error:  # of any kind: it ends this session, and the others go on
            self._jobs.fail(session, error)
        self._look_at(session)

    async def _open(self, session: TargetSession) -> None:
        sequence = await self._open_sequence(session)
        if (features := sequence.features) is not None:
            features.want(session.state.phase is not SessionPhase.UNDRAFTED)
        session.shared.counts.cached_tokens = len(session.cached_tokens)
        session.reads_until = session.shared.opened.num_read

    async def _end_prompt(self, session: TargetSession) -> None:
        """Hand the prompt, now that it is read, to whoever waits for it, and begin the rounds or the scoring."""
        opened, session.has_read_prompt = session.shared.opened, True
        await self._give_prompt_features(session)
        await self._hand_on(session)
        if opened.num_scored > 0:
            session.reads_until = len(opened.prompt) - 1
        else:
            self._jobs.texts[session.id] = session
            session.shared.on_room = partial(self._look_at, session)
            self._jobs.begin_round(session)

    async def _give_prompt_features(self, session: TargetSession) -> None:
        """Send the prompt's features to a drafter that reads features."""
        if self.drafter.mailbox is None or not session.shared.opened.drafted:
            return
        assert session.sequence is not None
        if (features := session.sequence.features) is not None and features.arrays():
            call = partial(features.take, len(session.cached_tokens))
            session.prompt_features = await self.worker.run(Job("prefill", call, session.id))
        if session.prompt_features is not None or (features is not None and self.drafter.has_model):
            self.drafter.send(PromptFeatures(session.id, session.prompt_features))

    async def _let_go(self, session: TargetSession) -> None:
        self._errands.pop(session, None)
        self._reading.prompts.pop(session, None)
        self._waiting.pop(session, None)
        if session in self._ready:
            self._take(session)
            self._target_queue.leave(session.id, self.worker.clock())
        self._jobs.texts.pop(session.id, None)
        self._set_num_texts()
        shared, error = session.shared, session.failure
        shared.on_room = None
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
        # A failed session must not keep the drafter busy until its consumer reads the error.
        if session.state.phase is not SessionPhase.CLOSED:
            self.drafter.send(Close(session.id))
        self._forget(session)

    async def _end_or_break(self, session: TargetSession, error: JobError) -> None:
        """End a session one of whose jobs failed, and the whole runtime if the model no longer works.

        An error that is not an `OutriderError` may still be caused by this session alone, by a prompt that does not fit
        into memory or by a processor. So the model counts as failed only if it also fails a probe.
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
