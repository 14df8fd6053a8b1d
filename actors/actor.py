"""What the two actors have in common: a mailbox, and a task for each session."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from actors.model import Model
from actors.session import Session
from actors.worker import Worker
from protocol.books import Books, Commit, State
from protocol.errors import OutriderError
from protocol.held import Held
from protocol.messages import Close, Message
from protocol.prices import Prices
from protocol.trace import Actor as ActorName
from protocol.trace import Event, Instant, InstantKind

S = TypeVar("S", bound="Part")


class Part(ABC):
    """One actor's part in one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.id = session.opened.session
        self.books = Books(session.opened)
        self.held = Held()
        self.scope = trio.CancelScope()
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
            async for message in self._inbox:
                # A session that is over here may still be spoken to by the other side.
                if (part := self._parts.get(message.session)) is None:
                    continue
                try:
                    part.receive(message)
                except OutriderError as error:
                    # A session that is in disorder ends; the others know nothing of it.
                    part.session.end(error)
                    part.scope.cancel()

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
            if part.books.state is not State.CLOSED:
                part.books.close(message)
                self._note(part, "cancel")
            part.scope.cancel()

    @trio.lowlevel.enable_ki_protection
    async def _run(self, part: S) -> None:
        try:
            with part.scope:
                await self._take_part(part)
        finally:
            del self._parts[part.id]
            part.session.leave()

    @property
    @abstractmethod
    def busy_seconds(self) -> float:
        """Time spent on jobs so far."""

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
        round = part.books.round if round is None else round
        self._on_event(Instant(self.name, kind, part.id, self._clock(), round, num_tokens, tokens, commit))


class ModelActor(Actor[S]):
    """An actor with a model, and a worker for it."""

    def __init__(self, model: Model, worker: Worker, on_event: Callable[[Event], None], prices: Prices) -> None:
        """As `Actor`, and:

        Args:
            model: lives on the worker's thread.
            worker: does the forward passes, for all sessions in turn.
        """
        super().__init__(on_event, prices, worker.clock)
        self.model = model
        self.worker = worker

    @property
    def busy_seconds(self) -> float:
        """See `Worker.busy_seconds`."""
        return self.worker.busy_seconds
