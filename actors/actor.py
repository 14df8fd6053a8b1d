"""What the two actors have in common: a mailbox, and a task for each session."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

import trio

from actors.model import CachedSequence, Model
from actors.prefix_cache import CacheHit, PrefixCache
from actors.session import Session
from actors.workers.worker import Job, JobError, Worker
from protocol.cached_tokens import CachedTokens, FeedPlan
from protocol.messages import Close, Message
from protocol.prefill_chunks import PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase, SessionState
from protocol.trace import Actor as ActorName
from protocol.trace import Event, Instant, InstantKind

logger = logging.getLogger("outrider")

S = TypeVar("S", bound="ActorSession")

# Bytes of caches that a model keeps of texts that are over, unless it is told otherwise.
PREFIX_CACHE_BYTES = 2 * 1024**3


class ActorSession(ABC):
    """One actor's part in one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.id = session.opened.session
        self.state = SessionState(session.opened)
        self.cached_tokens = CachedTokens()
        self.sequence: CachedSequence | None = None  # where what is held is, while it takes part
        self.scope = trio.CancelScope()
        self.is_over = trio.Event()  # and whatever it had is let go of, or kept
        # What its cache holds is not known any more, so that no other session may use it.
        self.is_in_disorder = False
        self._changed = trio.Event()

    @abstractmethod
    def receive(self, message: Message) -> None:
        """Take a message from the other actor. Never waits."""

    def wake(self) -> None:
        """Have the task look again at the state of things."""
        self._changed.set()

    async def change(self) -> None:
        """Wait until something has changed since the last time."""
        await self._changed.wait()
        self._changed = trio.Event()


class Actor(ABC, Generic[S]):
    """A mailbox, and one task a session."""

    name: ActorName

    def __init__(self, on_event: Callable[[Event], None], prices: Prices, clock: Callable[[], float]) -> None:
        """An actor that does nothing until `serve` runs.

        Args:
            on_event: called with each decision; see `protocol.trace`.
            prices: of the runtime, kept by both actors.
            clock: seconds, by which decisions are timed.
        """
        self._on_event = on_event
        self.prices = prices
        self._clock = clock
        # Unbounded, and yet never long: a session has at most one proposal and one verdict under way.
        # So sending never waits, and the two actors cannot wait for each other's mailboxes.
        self.mailbox, self._inbox = trio.open_memory_channel[Message](math.inf)
        self._parts: dict[int, S] = {}
        self._nursery: trio.Nursery | None = None
        self._when_over: list[Callable[[], None]] = []

    # A Ctrl-C belongs to the user's task, never into the middle of the books.
    @trio.lowlevel.enable_ki_protection
    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take sessions and messages until cancelled.

        Cancellation: the jobs that are running finish, and the sessions' caches are dropped, before
        this returns.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            try:
                async for message in self._inbox:
                    self._hand_over(message)
            finally:
                self._take_no_more_sessions()

    def _take_no_more_sessions(self) -> None:
        # A nursery closes when the last task in it ends, which may be long before the runtime is left.
        self._nursery = None
        for call in self._when_over:
            call()

    def _hand_over(self, message: Message) -> None:
        # A session that is over here may still be spoken to by the other side.
        if (part := self._parts.get(message.session)) is None:
            return
        if isinstance(message, Close):
            self.close_session(message)
            return
        try:
            part.receive(message)
        except Exception as error:  # whatever it is: the other sessions know nothing of it
            part.is_in_disorder = True
            self._fail(part, error)
            part.scope.cancel()

    @property
    def is_serving(self) -> bool:
        """Whether sessions can begin."""
        return self._nursery is not None

    @property
    def is_alive(self) -> bool:
        """Whether it can do its work; may be asked in any thread."""
        return self.is_serving

    def when_over(self, call: Callable[[], None]) -> None:
        """Have a function called as soon as no session can begin any more; at once where that is so.

        Args:
            call: must neither wait nor raise.
        """
        self._when_over.append(call)
        if not self.is_serving:
            call()

    def open_session(self, session: Session) -> None:
        """Begin a session. Never waits."""
        assert self._nursery is not None, "serve() is not running"
        part = self._join(session)
        self._parts[part.id] = part
        session.join()
        self._note(part, "open", num_tokens=len(session.opened.prompt), tokens=session.opened.prompt)
        self._nursery.start_soon(self._run, part, name=f"{self.name} session {part.id}")

    def close_session(self, message: Close) -> None:
        """End a session, soon: after the job that is running, if one is. Never waits."""
        if (part := self._parts.get(message.session)) is not None:
            if part.state.phase is not SessionPhase.CLOSED:
                part.state.close(message)
                self._note(part, "cancel")
            part.scope.cancel()

    @trio.lowlevel.enable_ki_protection
    async def _run(self, part: S) -> None:
        try:
            with part.scope:
                await self._take_part(part)
        finally:
            # Outside of the session's own scope, so the actor is being cancelled. `serve` may have a message to take
            # before it hears of that, and nobody shall see a session end in a runtime that is still open.
            if trio.current_effective_deadline() == -math.inf:
                self._take_no_more_sessions()
            del self._parts[part.id]
            part.is_over.set()
            part.session.leave()

    @property
    @abstractmethod
    def busy_seconds(self) -> float:
        """Time spent on jobs so far."""

    @abstractmethod
    def _fail(self, part: S, error: Exception) -> None:
        """Have a session do without this actor, or end, because of an error."""

    @abstractmethod
    def _join(self, session: Session) -> S:
        """Make this actor's part in a session."""

    @abstractmethod
    async def _take_part(self, part: S) -> None:
        """Play the part to its end."""

    def _note(
        self,
        part: S,
        kind: InstantKind,
        *,
        round: int | None = None,
        num_tokens: int = 0,
        tokens: tuple[int, ...] = (),
        commit: Commit | None = None,
    ) -> None:
        round = part.state.round if round is None else round
        self._on_event(Instant(self.name, kind, part.id, self._clock(), round, num_tokens, tokens, commit))


class ModelActor(Actor[S]):
    """An actor with a model, and a worker for it."""

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        """As `Actor`, and:

        Args:
            model: lives on the worker's thread.
            worker: does the forward passes, for all sessions in turn.
            prefix_cache_bytes: most memory for caches of texts that are over.
        """
        super().__init__(on_event, prices, worker.clock)
        self.model = model
        self.worker = worker
        self.chunk_size = PrefillChunkSize()
        # Of the thread, as the lines are: only jobs touch it.
        self._prefix_cache = PrefixCache(model, prefix_cache_bytes)

    @property
    def is_alive(self) -> bool:
        """See `Actor.is_alive`; its worker must do jobs, too."""
        return self.is_serving and self.worker.is_alive

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Actor.serve`. In the end, what was kept for other sessions is dropped, too."""
        try:
            await super().serve(task_status)
        finally:
            if len(self._prefix_cache) > 0:
                with trio.CancelScope(shield=True):
                    await self._clear_prefix_cache()

    async def _clear_prefix_cache(self) -> None:
        try:
            await self.worker.run(Job("close", self._prefix_cache.close))
        except JobError as error:
            logger.warning("what was kept of texts that are over cannot be closed: %s", error)

    @asynccontextmanager
    async def _line(self, part: S, *, beside_another: bool) -> AsyncIterator[CachedSequence]:
        """A cached sequence for a session. `part.cached_tokens` says what it holds of an earlier text.

        In the end it is kept for others where the session asks for that and did not fail, and else closed.
        """
        opened = part.session.opened
        if opened.settings.reuse_prefix:
            await self.unwanted_to_be_over(part)
            call = partial(self._prefix_cache.begin, opened.prompt, beside_another=beside_another)
        else:
            call = partial(_begin, self.model, beside_another)
        begun = await self.worker.run(Job("open", call, part.id))
        part.cached_tokens.follow(FeedPlan(0, opened.prompt[: begun.num_cached]))
        part.sequence = begun.sequence
        is_in_order = False
        try:
            yield begun.sequence
            is_in_order = True
        except (trio.Cancelled, trio.BrokenResourceError, trio.ClosedResourceError):
            is_in_order = True  # nobody wants the rest, or the runtime ends
            raise
        finally:
            part.sequence = None
            put: Callable[[], None] = begun.sequence.close
            if opened.settings.reuse_prefix and is_in_order and not part.is_in_disorder and part.session.error is None:
                put = partial(
                    self._prefix_cache.put,
                    begun.sequence,
                    part.cached_tokens.tokens,
                    tuple(part.state.committed),
                    beside_another=beside_another,
                    num_prompt=len(opened.prompt),
                )
            with trio.CancelScope(shield=True):
                await self.worker.run(Job("close", put, part.id))

    def session_of(self, session: int) -> S | None:
        """Its part in a session that is under way."""
        return self._parts.get(session)

    async def settled(self) -> PrefixCache:
        """What is kept for others, once sessions that nobody wants any more have put away theirs."""
        await self.unwanted_to_be_over()
        return self._prefix_cache

    async def unwanted_to_be_over(self, before: S | None = None) -> None:
        """Wait until what sessions had that nobody wants any more is kept, if they asked for that.

        It takes as long as their jobs that are running; nobody else keeps them from being over.

        Args:
            before: a session that begins and may want it; None for all.
        """
        for other in list(self._parts.values()):
            if other is not before and other.session.is_unwanted and other.session.opened.settings.reuse_prefix:
                await other.is_over.wait()

    @property
    def busy_seconds(self) -> float:
        """See `Worker.busy_seconds`."""
        return self.worker.busy_seconds


def _begin(model: Model, beside_another: bool) -> CacheHit:
    return CacheHit(model.open_sequence(beside_another=beside_another), 0)
