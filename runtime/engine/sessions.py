"""The sessions of one runtime: how they begin at the actors, their counts, and how they end."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.session import Session
from actors.target.target_actor import TargetActor
from protocol.errors import (
    MemoryLimitError,
    OutriderError,
    PromptTooLongError,
    ProtocolError,
    RuntimeBrokenError,
    SessionFileError,
    SettingsError,
)
from protocol.messages import Close, Open
from protocol.prices import Prices
from protocol.session_state import Commit
from protocol.statistics import Counts
from protocol.trace import Event, Span
from runtime.engine.drafter_slot import DrafterSlot
from runtime.engine.memory import MemoryBudget
from runtime.generation.answers.message_reader import Reader
from runtime.generation.reasoning import ReasoningCounter, ReasoningTracker, reader_of
from runtime.generation.text import GrowingText, StopFinder
from runtime.generation.token_stream import TokenStream
from runtime.generation.tool_calls.tools import Tools, check_callable
from runtime.loading.device import runs_on_battery
from runtime.persistence.saved_session import DRAFTER_WAIT_S

logger = logging.getLogger("outrider")

# Rounds that may wait for a slow consumer before the models wait with them.
BUFFERED_ROUNDS = 16

# Makes the reader of an answer from its reasoning, of which nothing was given yet; None if all of it is content.
NewReader = Callable[[ReasoningTracker], Reader | None]

# The readers of answers whose streams are begun in this task, which tell the content, where stop strings are searched
# for, from the rest. By default by the tokenizer's tags and the stream's tools; a server sets it for each request.
NEW_READER: ContextVar[NewReader | None] = ContextVar("outrider_new_reader", default=None)


@attrs.define(eq=False)
class IdleReading:
    """The prompts that are expected, and the task that reads them; see `runtime.open` about `idle_reading`.

    It gives way to anything else: a stream that begins waits for the pass that runs, what was read by then is kept, and
    what was expected is forgotten, since the stream may be what it was expected for. On battery nothing is read.
    """

    _is_idle: Callable[[], bool]  # whether the models have nothing to do
    _expected: list[Callable[[], Awaitable[object]]] = attrs.field(init=False, factory=list)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _wakeup: trio.Event = attrs.field(init=False, factory=trio.Event)

    def expect(self, read: Callable[[], Awaitable[object]]) -> None:
        """Call and await `read`, which reads a prompt and may be cancelled, once there is nothing else to do."""
        self._expected.append(read)
        self.look()

    def look(self) -> None:
        """Note that there may be nothing else to do."""
        if self._expected:
            self._wakeup.set()

    def give_way(self) -> None:
        """Note that there is something else to do. Never waits."""
        self._expected.clear()
        self._scope.cancel()

    async def run(self) -> None:
        """Read what is expected, until cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            while self._expected and self._is_idle():
                read = self._expected.pop()
                with trio.CancelScope() as self._scope:
                    try:
                        if not runs_on_battery():
                            await read()
                    except Exception as error:  # of any kind: nobody has asked for it
                        logger.debug("nothing was read ahead: %s", error)


@attrs.define(eq=False)
class Sessions:
    """The sessions of one runtime, and whether the runtime still takes any.

    A session begins at both actors when it is admitted: at once if fewer than `max_streams` are at work and its caches
    fit into the memory that is left, otherwise in the order of arrival. A text that outgrows what was reserved for it
    waits, too, before any session that has not begun. If all that are at work wait so, the last one gives up its cache,
    and reads its text again later.

    A session ends when its text is over, when its consumer closes or drops the stream, or with the runtime. It counts
    as admitted until both actors have released it, caches included: the bound is on the models' work and on the memory
    for caches. A finished text that a slow consumer has not read yet does not count.
    """

    _target: TargetActor
    _drafter: DrafterSlot
    _tokenizer: TokenizerWrapper | None
    _prices: Prices
    max_streams: int | None  # most sessions at work at a time, >= 1; None for no bound
    _memory_limit: int | None
    by_id: dict[int, Session] = attrs.field(init=False, factory=dict)  # those that have not ended yet
    past: Counts = attrs.field(init=False, factory=Counts)  # of those that have, summed
    failure: RuntimeBrokenError | None = attrs.field(init=False, default=None)  # of the target
    has_failed: trio.Event = attrs.field(init=False, factory=trio.Event)  # set once every session has that error
    idle_reading: IdleReading = attrs.field(init=False)
    _read_when_idle: Session | None = attrs.field(init=False, default=None)  # the last session that reads in idle time
    _admitted: dict[int, Session] = attrs.field(init=False, factory=dict)  # in this order
    _waiting: dict[int, Session] = attrs.field(init=False, factory=dict)  # for admission
    _growing: dict[int, Session] = attrs.field(init=False, factory=dict)  # admitted; they wait for more memory
    # Before the budget, which other runtimes know, and may call from other threads, as soon as it is made.
    _trio_token: trio.lowlevel.TrioToken = attrs.field(init=False, factory=trio.lowlevel.current_trio_token)
    memory: MemoryBudget = attrs.field(init=False)
    _scopes: set[trio.CancelScope] = attrs.field(init=False, factory=set)  # of calls in `while_open`
    # Held while a session's counts move to `past`: another thread may be adding all of them up.
    _counts_lock: threading.Lock = attrs.field(init=False, factory=threading.Lock)
    _closed: OutriderError | None = attrs.field(init=False, default=None)

    @memory.default
    def _new_budget(self) -> MemoryBudget:
        memory = MemoryBudget(
            math.inf if self._memory_limit is None else self._memory_limit,
            self._target.model,
            lambda: draft.model if isinstance(draft := self._drafter.actor, DraftActor) else None,
            partial(self.run_soon, self._memory_has_changed),
        )
        self._target.prefix_room = partial(memory.prefix_room, "target")
        return memory

    @idle_reading.default
    def _new_idle_reading(self) -> IdleReading:
        return IdleReading(lambda: not self.by_id)

    @property
    def is_open(self) -> bool:
        """Whether the runtime still takes sessions."""
        return self._closed is None

    @property
    def num_streams(self) -> int:
        """Sessions that are at work for somebody."""
        return _num_wanted(self.by_id) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for admission."""
        return _num_wanted(self._waiting)

    def counts(self) -> Counts:
        """The counts of all sessions so far, added up. May be called in any thread."""
        counts = Counts()
        with self._counts_lock:
            counts.add(self.past)
            for session in list(self.by_id.values()):
                counts.add(session.counts)
        return counts

    def check_open(self) -> None:
        """See `Runtime.check_open`."""
        if self._closed is not None:
            # A new object each time: a traceback grows on an exception that is raised again.
            raise _again(self._closed)

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Run a block that asks the models for something; closing the runtime cancels it.

        Raises: as `check_open`, also if the runtime was closed in the middle of the block.
        """
        self.check_open()
        has_failed = False
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            except OutriderError:
                if self._closed is None:
                    raise
                has_failed = True  # a shielded part has found the models gone
            finally:
                self._scopes.remove(scope)
        if has_failed or scope.cancelled_caught:
            assert self._closed is not None
            raise _again(self._closed)

    def _new_session(self, opened: Open, buffer: int) -> tuple[Session, trio.MemoryReceiveChannel[Commit]]:
        self.check_open()
        opened = self.memory.bounded(opened)
        send, receive = trio.open_memory_channel[Commit](buffer)
        session = Session(opened, send)
        session.counts.prompt_tokens = len(opened.prompt)
        return session, receive

    def begin(self, opened: Open, tools: Tools | None = None) -> TokenStream:
        """Begin a generation; `tools` are what the model was told that it may call.

        Raises:
            RuntimeClosedError, RuntimeBrokenError: as `check_open`.
            PromptTooLongError: the memory limit has no room for the prompt.
            SettingsError: a grammar has no place for the end of the reasoning, which has a budget.
        """
        session, receive = self._new_session(opened, BUFFERED_ROUNDS)
        opened = session.opened
        self.idle_reading.give_way()
        reasoning = ReasoningTracker(self._tokenizer, opened.prompt)
        format = None if tools is None else check_callable(tools, self._tokenizer)
        of_answer = partial(reader_of, format=format, tools=() if tools is None else tools.callable)
        new_reader = NEW_READER.get() or of_answer
        if opened.settings.stop and self._tokenizer is not None:
            session.find_stop = StopFinder(self._tokenizer, opened, new_reader(reasoning))
        new_limit = partial(self._new_limit, opened, reasoning, new_reader)
        if (budget := opened.settings.thinking_budget) is not None and (limit := new_limit(budget)) is not None:
            if (grammar := limit.excluded_by(opened.settings.logits_processors)) is not None:
                raise SettingsError(
                    f"thinking_budget={budget} would end the reasoning, which the prompt has begun, with "
                    f"{reasoning.tags[1]!r}, and {grammar} has no place for that; leave thinking_budget out, switch "
                    "reasoning off in the chat template, or begin the grammar with any text and this tag"
                )
            session.reasoning_limit = limit
        stream = TokenStream(
            session,
            receive,
            GrowingText(self._tokenizer, opened, new_reader(reasoning)),
            reasoning,
            None if tools is None else of_answer(reasoning),
            end_soon=partial(self._end_soon, opened.session),
            end_thinking_soon=partial(self.run_soon, partial(self._end_thinking, session, new_limit)),
            clock=self._target.worker.clock,
            estimates=self._prices.estimates,
        )
        self.by_id[opened.session] = session
        self._enter(session)
        return stream

    def _new_limit(
        self, opened: Open, reasoning: ReasoningTracker, new_reader: NewReader, num_tokens: int
    ) -> ReasoningCounter | None:
        """A limit of an answer's reasoning; None if it has none that could be told apart."""
        if self._tokenizer is None or not all(reasoning.tags) or (reader := new_reader(reasoning)) is None:
            return None
        return ReasoningCounter(self._tokenizer, reasoning.tags, reader, len(opened.prompt), num_tokens)

    def _end_thinking(self, session: Session, new_limit: Callable[[int], ReasoningCounter | None]) -> None:
        if session.reasoning_limit is None:
            limit = new_limit(0)
            if limit is not None and limit.excluded_by(session.opened.settings.logits_processors) is None:
                session.reasoning_limit = limit
        else:
            session.reasoning_limit.end()
        if session.on_change is not None:
            session.on_change()

    async def read(self, opened: Open, *, is_idle: bool = False) -> Session:
        """Run a session that generates nothing until the target has ended it. Its drafter reads on, unless others need
        the room. For idle reading, nothing is read if there is no room for it at once, and the drafter is waited for.

        Raises: as `begin`, and the error that has ended the session early.

        Cancellation: ends the session after its running pass.
        """
        if not is_idle:
            self.idle_reading.give_way()
        session, receive = self._new_session(opened, 0)
        self.by_id[opened.session] = session
        is_read = False
        try:
            self._enter(session)
            if is_idle:
                if opened.session in self._waiting:
                    return session
                self._read_when_idle = session
            async for commit in receive:  # none comes; the channel is closed once the target has read
                raise ProtocolError(f"a session that generates nothing has committed {commit!r}")
            if is_idle:
                await session.has_left.wait()
            is_read = session.error is None
        finally:
            receive.close()
            self._end(opened.session, drafter_reads_on=is_read)
        if session.error is not None:
            raise session.error
        return session

    async def end_idle_reading(self) -> None:
        """Have what is read in idle time given up, and wait until its caches are put away: at most `DRAFTER_WAIT_S`."""
        self.idle_reading.give_way()
        if self._read_when_idle is not None:
            with trio.move_on_after(DRAFTER_WAIT_S):  # a drafter that hangs puts nothing away
                await self._read_when_idle.has_left.wait()

    def run_soon(self, call: Callable[[], None]) -> None:
        """Have a function called in trio's thread; for any thread, at any moment."""
        with suppress(trio.RunFinishedError):  # with the event loop, everything has ended
            self._trio_token.run_sync_soon(call)

    def attribute(self, event: Event) -> None:
        """Count a worker's time for the sessions that it was spent on, and the target's passes for those in them."""
        if not isinstance(event, Span):
            return
        fractions = event.fractions
        tokens = {share.session: share.num_tokens for share in event.shares} if event.kind == "prefill" else {}
        for index, (id, fraction) in enumerate(fractions.items()):
            session = self.by_id.get(id)
            if event.gives_tokens:  # counted also for one that has ended meanwhile
                counts = self.past if session is None else session.counts
                counts.take_part(len(fractions), is_first=index == 0)
            if session is None:
                continue
            counts, seconds = session.counts, fraction * (event.ended - event.began)
            if event.actor == "draft":
                counts.draft_seconds += seconds
                continue
            counts.target_seconds += seconds
            if event.kind == "prefill":
                counts.prefilled_tokens += tokens.get(id, event.num_read)
                counts.prefill_seconds += seconds

    def fail(self, error: OutriderError) -> None:
        """End every session with the target's error, and take no others."""
        cause = error.__cause__ or error
        self.failure = RuntimeBrokenError(f"the target model failed, and the runtime with it: {cause}")
        self.close(self.failure, cause)
        self.has_failed.set()

    def close(self, error: OutriderError, cause: BaseException | None = None) -> None:
        """End every session with an error, and take no others; nothing happens if this was done before."""
        if self._closed is not None:
            return
        error.__cause__ = cause
        self._closed = error
        for scope in self._scopes:
            scope.cancel()
        for id, session in list(self.by_id.items()):
            session.end(_again(error))
            self._end(id)

    def make_room(self) -> None:
        """Have the models' prefix caches give up what has no room beside the sessions. Never waits."""
        self._target.make_room()
        self._make_room_at_drafter()

    def _make_room_at_drafter(self) -> None:
        if isinstance(draft := self._drafter.actor, DraftActor):
            draft.make_room()

    def models_have_changed(self) -> None:
        """Note that a drafter was attached or detached, whose weights and caches count. Never waits."""
        if self.memory.is_open:
            self.memory.note_models()
            self._memory_has_changed()

    def _memory_has_changed(self) -> None:
        """The models, or another runtime of the process, have taken memory or released some."""
        if self.memory.is_open:  # the call may come after the end
            self.make_room()
            self._admit_next()

    def _enter(self, session: Session) -> None:
        """Begin a session as soon as there is room."""
        self._waiting[session.opened.session] = session
        self._admit_next()

    def _leave(self, id: int) -> None:
        del self._admitted[id]
        self._growing.pop(id, None)
        self.memory.release(id)
        self._admit_next()

    def _admit_next(self) -> None:
        """Let texts grow and sessions begin, in the order in which they asked, as far as there is room."""
        # If the actors are being cancelled, waiting sessions are about to end with RuntimeClosedError.
        if self._closed is not None or not self._target.is_serving:
            return
        for id in [id for id in self._admitted if id in self._growing]:
            session = self._growing[id]
            if (num_tokens := self.memory.grow(id)) is None:
                break
            del self._growing[id]
            session.num_reserved, session.awaits_memory = num_tokens, False
            self.make_room()
            if session.on_change is not None:
                session.on_change()
        if not self._growing:
            while self._waiting and (self.max_streams is None or len(self._admitted) < self.max_streams):
                id, session = next(iter(self._waiting.items()))
                try:
                    num_tokens = self.memory.reserve(session.opened)
                except (PromptTooLongError, SessionFileError) as error:  # there are more models now, or a file is gone
                    del self._waiting[id]
                    session.end(error)
                    self._end(id)
                    continue
                if num_tokens is None:
                    break
                del self._waiting[id]
                session.num_reserved = num_tokens
                self._admit(session)
        elif all(id in self._growing and id in self.by_id for id in self._admitted):
            self._make_way()
        if not self._waiting:
            self.memory.end_waiting()
        if self._waiting or self._growing:
            for session in [each for id, each in self._admitted.items() if id not in self.by_id]:
                self._close(session)  # its drafter may be reading on

    def _make_way(self) -> None:
        """All sessions at work wait for memory: the last one gives up its cache, which is read again later. Also the
        first one, if those of other runtimes wait, too; otherwise these will release memory.
        """
        first, *others = self._admitted
        rivals = self.memory.rivals()
        waits = any(not rival.is_stuck for rival in rivals)
        for id in (*reversed(others), *([first] if rivals and not waits else [])):
            if self.memory.may_give_way(id):
                self._target.give_way(self._growing[id], partial(self._has_given_way, id))
                return
        self.memory.is_stuck = waits
        if waits:
            return
        id = others[-1] if others else first
        self._growing[id].end(MemoryLimitError(self.memory.shortage(id)))
        self._end(id)

    def _has_given_way(self, id: int) -> None:
        if id in self._growing:
            self.memory.give_way(id)
            self._admit_next()

    def _grow(self, session: Session) -> None:
        session.awaits_memory = True
        self._growing[session.opened.session] = session
        self._admit_next()

    def _admit(self, session: Session) -> None:
        id = session.opened.session
        self._admitted[id] = session
        session.on_left = partial(self._leave, id)
        session.on_full = partial(self._grow, session)
        draft = self._drafter.drafter_of(session.opened.settings) if session.opened.drafted else None
        if (draft is None or not draft.is_serving) and session.opened.drafted:
            # The drafter was detached while this session waited for admission, or everything is about to end.
            session.opened = attrs.evolve(session.opened, drafted=False)
        elif draft is not None and self._target.model.records_features and not session.opened.only_reads:
            session.opened = attrs.evolve(session.opened, target_begins=True)
        self._target.open_session(session)
        if draft is not None and session.opened.drafted:
            draft.open_session(session)
        else:  # the target's prefixes make room as the session's sequence is opened, and a drafter opens none
            self._make_room_at_drafter()

    def _end_soon(self, id: int) -> None:
        """End a session, from any thread; harmless if it is over."""
        if (unwanted := self.by_id.get(id)) is not None:
            unwanted.is_unwanted = True
        self.run_soon(partial(self._end, id))

    def _end(self, id: int, *, drafter_reads_on: bool = False) -> None:
        """End a session; harmless if it is over. Its drafter may read on, if the target has ended it."""
        with self._counts_lock:
            if (session := self.by_id.pop(id, None)) is None:
                return
            self.past.add(session.counts)
        was_waiting = self._waiting.pop(id, None) is not None
        if not drafter_reads_on:
            self._close(session)
        self.idle_reading.look()
        if was_waiting:  # and was perhaps the only one for which there was no room
            self._admit_next()

    def _close(self, session: Session) -> None:
        """End a session at both actors; harmless if it is over there."""
        session.is_unwanted = True
        self._target.close_session(Close(session.opened.session))
        self._drafter.close_session(Close(session.opened.session))


def _num_wanted(sessions: dict[int, Session]) -> int:
    # Another thread may be asking. A session that is over is put away in the next turn of the event loop.
    return sum(not session.is_unwanted for session in list(sessions.values()))


def _again(error: OutriderError) -> OutriderError:
    """A fresh exception that says the same, with the same cause."""
    fresh = type(error)(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh
