"""The base classes of the actors: a mailbox, and the sessions as values."""

from __future__ import annotations

import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Generic, Protocol, TypeVar

import outcome
import trio

from actors.model import CachedSequence, Model
from actors.prefix_cache import CachedPrefix, CacheHit, PrefixCache, PrefixStore, common_length, pack, packed_beginning
from actors.prompt_cache import open_continued
from actors.session import Session
from actors.workers.worker import Job, JobError, Worker
from protocol.cached_tokens import CachedTokens, FeedPlan
from protocol.messages import Close, Message
from protocol.open_options import PREFIX_CACHE_BYTES
from protocol.pass_price import PassPrice
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS, PrefillChunkSize
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase, SessionState
from protocol.trace import ActorName as ActorName
from protocol.trace import Event, Instant, InstantKind

logger = logging.getLogger("outrider")

S = TypeVar("S", bound="ActorSession")
T = TypeVar("T")

# The shortest beginning that a session waits for while another one reads it. Prompts with less in common are read
# sooner by themselves, or together in one pass.
MIN_AWAITED = 64

# Besides the one at the end of a prompt, a prefix checkpoint is made this many tokens before it: in the next prompt, a
# chat template leaves out the tokens that asked for the answer, such as a tag that begins reasoning.
CHECKPOINT_DISTANCE = 16

CHECKPOINT_INTERVAL = 1024  # a prefix checkpoint is made at least every so many tokens of a prompt


class Mailbox(Protocol):
    """Where messages to an actor go: a memory channel, or a link to another process."""

    def send_nowait(self, message: Message, /) -> None:
        """Send a message. Never waits."""


class LocalMailbox:
    """An actor's mailbox in this process: a queue, and an event that each message sets."""

    def __init__(self, event: trio.Event) -> None:
        self.event = event  # set by each message. The actor swaps it, so that its loop or its receiver wakes.
        self._messages = deque[Message]()

    def send_nowait(self, message: Message, /) -> None:
        self._messages.append(message)
        self.event.set()

    def received(self) -> Iterator[Message]:
        """The messages that have come, in order, also those that come meanwhile. Never waits."""
        while self._messages:
            yield self._messages.popleft()


class ActorSession:
    """The state of one session at one actor."""

    def __init__(self, shared: Session) -> None:
        self.shared = shared  # what the runtime and both actors share about the session
        self.opened, self.settings = shared.opened, shared.opened.settings
        self.id = shared.opened.session
        self.state = SessionState(shared.opened)
        self.cached_tokens = CachedTokens()
        self.sequence: CachedSequence | None = None  # the text in the model's cache, while the actor works on it
        self.alongside_model = True  # see `Model.open_sequence`
        self.is_over = trio.Event()  # set when its work is ended, and the cached sequence closed or kept
        self.is_broken = False  # whether the content of the cache is unknown, so that no other session may use it
        self.may_open = False  # whether nothing is waited for before its sequence is opened
        self.has_read_prompt = False  # whether the cache has held all of the prompt that is read without logits
        num_read = shared.opened.num_read
        # Lengths of the prompt at which its cache keeps a prefix checkpoint, if it needs any.
        self.checkpoints = {num_read - CHECKPOINT_DISTANCE, num_read, *range(0, num_read, CHECKPOINT_INTERVAL)}
        self.checkpoints.update(shared.opened.message_starts)
        # None before the search for a stored prefix of its prompt, False during that, True afterwards.
        self.is_disk_searched: bool | None = None
        self._num_common: dict[int, int] = {}  # by session

    @cached_property
    def packed_prompt(self) -> bytes:
        """The tokens of the prompt that are read without logits, for comparisons."""
        return pack(self.opened.prompt[: self.opened.num_read])

    def num_common(self, other: ActorSession) -> int:
        """Tokens that both prompts begin with. Compared once: it is asked often, of all pairs."""
        if other.id not in self._num_common:
            self._num_common[other.id] = common_length(self.packed_prompt, other.packed_prompt)
        return self._num_common[other.id]

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass in which its prompt is read, if its cache depends on passes."""
        size = self.settings.prefill_step_size
        return FIXED_CHUNK_TOKENS if size == "auto" else size

    @property
    def num_prompt_cached(self) -> int:
        """Tokens of the prompt that the cache holds. To be asked while no job of the session runs."""
        if self.sequence is None:
            return 0
        return min(len(self.cached_tokens), self.sequence.length, self.opened.num_read)

    @property
    def goes_on_reading(self) -> bool:
        """Whether it will read the rest of its prompt, unless it is cancelled."""
        return (
            self.settings.reuse_prefix
            and not self.has_read_prompt
            and not self.shared.is_unwanted
            and self.state.phase is not SessionPhase.CLOSED
            and self.num_prompt_cached < self.opened.num_read
        )

    def notice_loss(self) -> bool:
        """Have the ledger say what the cache holds, before a plan. Returns: whether a failed pass has emptied it."""
        sequence, cached_tokens = self.sequence, self.cached_tokens
        if sequence is None or sequence.length >= len(cached_tokens):
            return False
        cached_tokens.rewind(sequence.length)
        return True


class Actor(ABC, Generic[S]):
    """A mailbox, and the sessions that it works on, in one loop, which has the next job done. All waiting is in one
    place.

    Messages are taken in as they come: by the loop while it waits, and by a second task while a job runs.
    """

    name: ActorName

    def __init__(self, on_event: Callable[[Event], None], prices: Prices, clock: Callable[[], float]) -> None:
        """Make an actor that does nothing until `serve` runs. Both actors update the runtime's prices."""
        self._on_event = on_event
        self.prices = prices
        self._clock = clock
        self._mail = trio.Event()
        self.mailbox = LocalMailbox(self._mail)
        self._sessions: dict[int, S] = {}
        self._changed: dict[S, None] = {}
        self._wakeup = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._when_over: Callable[[], None] = lambda: None

    # A Ctrl-C belongs to the user's task, and must never strike while session state is being changed.
    @trio.lowlevel.enable_ki_protection
    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take sessions and messages until cancelled; before it returns, running jobs end, and caches are closed."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._loop)
            task_status.started()
            try:
                while True:
                    await (mail := self._mail).wait()
                    self._mail = trio.Event()
                    if self.mailbox.event is mail:  # and the loop does not wait
                        self.mailbox.event = self._mail
                    self.take_messages()
            finally:
                self._take_no_more_sessions()

    @trio.lowlevel.enable_ki_protection
    async def _loop(self) -> None:
        try:
            while True:
                self._wakeup = trio.Event()
                await self._turn()
        finally:
            # Nobody must see a session end in a runtime that is still open.
            self._take_no_more_sessions()
            with trio.CancelScope(shield=True):
                for session in list(self._sessions.values()):
                    await self._let_go(session)

    @abstractmethod
    async def _turn(self) -> None:
        """Do the next job; or wait until a session has changed, or a moment has come."""

    async def _wait(self, seconds: float = math.inf) -> None:
        """Wait until a session has changed or a message has come, for at most as long."""
        self.mailbox.event = self._wakeup
        with trio.move_on_after(seconds):
            await self._wakeup.wait()
        self.mailbox.event = self._mail
        self.take_messages()

    def take_messages(self) -> None:
        """Take in the messages that have come, unless the actor ends. Never waits."""
        if self.is_serving:
            for message in self.mailbox.received():
                self._hand_over(message)

    @abstractmethod
    async def _let_go(self, session: S) -> None:
        """End the work on a session, and let go of its cache."""

    def _look_at(self, session: S) -> None:
        self._changed[session] = None
        self._wakeup.set()

    def _take_no_more_sessions(self) -> None:
        # A nursery closes when the last task in it ends, which may be long before the runtime is left.
        self._nursery = None
        self._when_over()

    def _hand_over(self, message: Message) -> None:
        # The other actor may still send messages for a session that is over here.
        if (session := self._sessions.get(message.session)) is None:
            return
        if isinstance(message, Close):
            self._close(message)
            return
        try:
            self._receive(session, message)
        except Exception as error:  # of any kind: it must not reach the other sessions
            session.is_broken = True
            self._fail(session, error)
            self._look_at(session)

    @abstractmethod
    def _receive(self, session: S, message: Message) -> None:
        """Take a session's message from the other actor. Never waits."""

    @property
    def is_serving(self) -> bool:
        """Whether sessions can begin."""
        return self._nursery is not None

    @property
    def is_alive(self) -> bool:
        """Whether the actor can do its work. May be read in any thread."""
        return self.is_serving

    async def ask(self, work: Callable[[], Awaitable[T]], wait_s: float) -> T | None:
        """The result of some work on the actor's worker; None if it takes longer than `wait_s` or the actor has ended.

        The work has a task of its own, cancelled then or with the call: nobody waits for a worker that hangs.
        """
        result: outcome.Outcome[T] | None = None
        has_come, scope = trio.Event(), trio.CancelScope()

        @trio.lowlevel.enable_ki_protection
        async def run() -> None:
            nonlocal result
            with scope:
                try:
                    result = outcome.Value(await work())
                except Exception as error:  # of any kind: it belongs to whoever asks
                    result = outcome.Error(error)
                has_come.set()

        if self._nursery is not None:
            self._nursery.start_soon(run)
            try:
                with trio.move_on_after(wait_s):
                    await has_come.wait()
            finally:
                scope.cancel()
        return None if result is None else result.unwrap()

    def when_over(self, call: Callable[[], None]) -> None:
        """Call a function, which neither waits nor raises, as soon as no session can begin any more."""
        self._when_over = call
        if not self.is_serving:
            call()

    def open_session(self, shared: Session) -> None:
        """Begin a session. Never waits."""
        assert self._nursery is not None, "serve() is not running"
        session = self._new_session(shared)
        self._sessions[session.id] = session
        shared.join()
        self._note(session, "open", num_tokens=len(shared.opened.prompt), tokens=shared.opened.prompt)
        self._look_at(session)

    def close_session(self, message: Close) -> None:
        """End a session, after its running job if there is one. Never waits."""
        self._close(message)

    def _close(self, message: Close) -> None:
        if (session := self._sessions.get(message.session)) is not None:
            if session.state.phase is not SessionPhase.CLOSED:
                session.state.close(message)
                self._note(session, "cancel")
            self._look_at(session)

    def _forget(self, session: S) -> None:
        del self._sessions[session.id]
        self._changed.pop(session, None)
        session.is_over.set()
        session.shared.leave()

    @property
    @abstractmethod
    def busy_seconds(self) -> float:
        """Seconds spent on jobs so far."""

    @abstractmethod
    def _fail(self, session: S, error: Exception) -> None:
        """End a session, or have it go on without this actor, because of an error."""

    @abstractmethod
    def _new_session(self, shared: Session) -> S:
        """Make this actor's state of a session."""

    def _note(
        self,
        session: S,
        kind: InstantKind,
        *,
        round: int | None = None,
        num_tokens: int = 0,
        tokens: tuple[int, ...] = (),
        commit: Commit | None = None,
    ) -> None:
        if not getattr(self._on_event, "wants_instants", True):
            return
        round = session.state.round if round is None else round
        self._on_event(Instant(self.name, kind, session.id, self._clock(), round, num_tokens, tokens, commit))


class ModelActor(Actor[S]):
    """An actor with a model and a worker."""

    def __init__(
        self,
        model: Model,
        worker: Worker,
        on_event: Callable[[Event], None],
        prices: Prices,
        *,
        pass_price: PassPrice,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        """As `Actor`; the model lives on the worker's thread."""
        super().__init__(on_event, prices, worker.clock)
        self.model, self.worker = model, worker
        self.chunk_size = PrefillChunkSize(pass_price)
        # Belongs to the worker's thread, as the cached sequences do: only jobs touch it.
        self.prefix_cache = PrefixCache(model, prefix_cache_bytes)
        self.prefix_room: Callable[[], float] = lambda: math.inf  # bytes that sessions leave to the prefix cache
        self._prefix_cache_bytes = prefix_cache_bytes
        self._has_less_room = False

    @property
    def is_alive(self) -> bool:
        """The worker must be alive, too."""
        return self.is_serving and self.worker.is_alive

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Closes the prefix cache in the end."""
        try:
            await super().serve(task_status)
        finally:
            with trio.CancelScope(shield=True):
                if len(self.prefix_cache) > 0:
                    try:
                        await self.worker.run(Job("close", self.prefix_cache.close))
                    except JobError as error:
                        logger.warning("the prefix cache cannot be closed: %s", error)
                if (store := self.prefix_cache.store) is not None:
                    await store.flush()
                    self.prefix_cache.store = None  # it refers to this actor, whose model is to be freed

    # --- opening and closing sequences ------------------------------------------------------------

    def _may_open(self, session: S) -> bool:
        """Whether to open the session's sequence now; False while a beginning of its text is still read or loaded."""
        awaits = self._unwanted, self._awaits_beginning, self._awaits_disk
        session.may_open = not (session.settings.reuse_prefix and any(each(session) for each in awaits))
        return session.may_open

    def _awaits_disk(self, session: S) -> bool:
        """Whether what is stored of the session's prompt is not loaded yet; begins to load it."""
        if session.is_disk_searched is None and (store := self.prefix_cache.store) is not None:
            assert self._nursery is not None
            session.is_disk_searched = False
            self._nursery.start_soon(self._bring_back, session, store)
        return session.is_disk_searched is False

    def _awaits_beginning(self, session: S) -> bool:
        """Whether another session is about to read more of the session's prompt than any has read so far."""
        least = min(MIN_AWAITED, session.opened.num_read)
        num_common = {
            other: session.num_common(other)
            for other in itertools.takewhile(lambda other: other is not session, self._sessions.values())
            if other.alongside_model == session.alongside_model and other.settings.reuse_prefix
        }
        available = max((min(each, other.num_prompt_cached) for other, each in num_common.items()), default=0)
        awaits = False
        for other, each in num_common.items():
            if each >= least and each > available and other.goes_on_reading and _can_share(session, other, each):
                other.checkpoints.add(each)
                awaits = True
        return awaits

    def _wake_waiting(self) -> None:
        """Look at the sessions that are not open yet: what they wait for may be there."""
        for session in self._sessions.values():
            if session.sequence is None and not session.may_open:
                self._look_at(session)

    @trio.lowlevel.enable_ki_protection
    async def _bring_back(self, session: S, store: PrefixStore) -> None:
        """Wait for what is stored of a session's prompt, in a task of its own: files are read meanwhile."""
        prompt = session.opened.prompt[: session.opened.num_read + 1]
        try:
            await store.bring_back(prompt, alongside_model=session.alongside_model)
        except Exception as error:  # of any kind: it must not reach the other sessions
            self._fail(session, error)
        session.is_disk_searched = True
        self._look_at(session)

    async def _open_sequence(self, session: S) -> CacheHit:
        """Give a session a sequence that holds a beginning of its prompt, or a new one."""
        in_use = [
            source
            for other in self._sessions.values()
            if other.settings.reuse_prefix and (source := _source(other, session)) is not None
        ]
        call = partial(self._opened_sequence, session, in_use, self.prefix_room())
        hit = await self.worker.run(Job("open", call, session.id))
        session.sequence = hit.sequence
        session.cached_tokens.follow(FeedPlan(0, session.opened.prompt[: hit.num_cached]))
        session.checkpoints.add(hit.num_common)  # where prompts part, a third one will part, too
        self._wake_waiting()
        return hit

    def _opened_sequence(self, session: S, in_use: Sequence[CachedPrefix], prefix_room: float) -> CacheHit:
        """On the worker's thread. Other prefixes than the session's own make room for it."""
        path, prompt, alongside_model = (
            session.settings.prompt_cache_file,
            session.opened.prompt,
            session.alongside_model,
        )
        if path is None:
            hit = self.prefix_cache.open(
                prompt[: session.opened.num_read + 1],  # the last of these is fed in any case, for its logits
                alongside_model=alongside_model,
                pass_tokens=session.pass_tokens,
                in_use=in_use,
                may_reuse=session.settings.reuse_prefix,
            )
        elif self.name == "target":
            hit = CacheHit(open_continued(self.model, path, alongside_model=alongside_model), 0)
        else:  # it reads only what comes after the file's tokens: that costs speed, not text
            hit = CacheHit(self.model.open_sequence(alongside_model=alongside_model), 0)
        self.prefix_cache.shrink(prefix_room)
        return hit

    async def _empty_sequence(self, session: S) -> None:
        """Give a session an empty sequence in place of its own, whose text is read again when the session goes on."""
        assert session.sequence is not None
        call = partial(self._emptied, session.sequence, alongside_model=session.alongside_model)
        session.sequence = await self.worker.run(Job("open", call, session.id))
        session.notice_loss()

    def _emptied(self, sequence: CachedSequence, *, alongside_model: bool) -> CachedSequence:
        """On the worker's thread."""
        sequence.close()
        return self.model.open_sequence(alongside_model=alongside_model)

    async def _put_away(self, session: S) -> None:
        """Close a session's sequence; or give it to the prefix cache if the session asks for that and did not fail."""
        sequence = session.sequence
        if sequence is None:
            return
        session.notice_loss()
        session.sequence = None
        put_away: Callable[[], None] = sequence.close
        # A runtime that closes ends all sessions with an error, even one that has just finished.
        is_sound = session.shared.error is None or session.state.finish_reason is not None
        if session.settings.reuse_prefix and not session.is_broken and is_sound:
            put_away = partial(
                self.prefix_cache.put,
                sequence,
                session.cached_tokens.tokens,
                tuple(session.state.committed),
                alongside_model=session.alongside_model,
                num_prompt=session.opened.num_read + 1,
                pass_tokens=session.pass_tokens,
            )
        with trio.CancelScope(shield=True):
            await self.worker.run(Job("close", put_away, session.id))

    def _forget(self, session: S) -> None:
        super()._forget(session)
        self._wake_waiting()

    async def _give_up_prefixes(self) -> None:
        """Evict prefixes that have no room any more, if there may be some."""
        if not self._has_less_room:
            return
        self._has_less_room = False
        try:
            await self.worker.run(Job("close", partial(self.prefix_cache.shrink, self.prefix_room())))
        except JobError as error:
            logger.warning("a cached prefix cannot be closed: %s", error)

    def make_room(self) -> None:
        """Have prefixes evicted that have no room any more, before the next job. Never waits."""
        if self.prefix_room() < self._prefix_cache_bytes:
            self._has_less_room = True
            self._wakeup.set()

    async def settled_prefix_cache(self) -> PrefixCache:
        """The prefix cache, once unwanted sessions have ended their running jobs and put their sequences into it."""
        for session in self._unwanted():
            await session.is_over.wait()
        return self.prefix_cache

    def _unwanted(self, before: S | None = None) -> list[S]:
        """The sessions but `before` that nobody wants any more, and whose sequences the prefix cache will get."""
        return [
            other
            for other in self._sessions.values()
            if other is not before and other.shared.is_unwanted and other.settings.reuse_prefix
        ]

    @property
    def busy_seconds(self) -> float:
        return self.worker.busy_seconds


def _can_share(session: ActorSession, other: ActorSession, num_common: int) -> bool:
    """Whether a session can copy the first tokens of another's sequence once they were read; True if not known yet."""
    if (sequence := other.sequence) is None:
        return True
    if (reusable := sequence.reusable) is None or not reusable.can_copy:
        return False
    num_read = session.opened.num_read
    are_equal = num_common == num_read == other.opened.num_read and session.pass_tokens == other.pass_tokens
    shared_from = reusable.shared_from(num_read, session.pass_tokens)
    return are_equal or (shared_from is not None and num_common >= shared_from)


def _source(other: ActorSession, session: ActorSession) -> CachedPrefix | None:
    """The sequence of another session, as far as it holds its prompt; None if it cannot be copied."""
    if (sequence := other.sequence) is None or other.is_broken:
        return None
    if (reusable := sequence.reusable) is None or not reusable.can_copy:
        return None
    has_read_same = (
        other.packed_prompt == session.packed_prompt
        and other.pass_tokens == session.pass_tokens
        and other.num_prompt_cached == sequence.length == session.opened.num_read
    )
    packed = packed_beginning(other.packed_prompt, other.num_prompt_cached)
    return CachedPrefix(reusable, packed, other.alongside_model, other.pass_tokens, has_read_same=has_read_same)
