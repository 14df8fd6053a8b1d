"""The end of a link at which a drafter works: the same actor as in one process, with the link for its mailboxes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import trio

from actors.drafters.draft_actor import DraftActor
from actors.drafters.drafter import MakePolicy
from actors.model import Model
from actors.remote.link import BEAT_S, Link, aged
from actors.session import Session
from actors.workers.worker import Worker
from protocol.drafter_wire import (
    COUNTED,
    MAX_DRAWN_FROM,
    DraftNews,
    LinkMessage,
    TargetNews,
    decode,
    encode,
)
from protocol.errors import OutriderError, ProtocolError
from protocol.messages import Close, Due, Message, Open, Overdue, PromptFeatures, Proposal, Rested, Verdict, Withdraw
from protocol.prices import OF_DRAFTER, Measurement, Prices
from protocol.session_state import Commit
from protocol.target_queue import TargetQueue
from protocol.trace import Event

MAX_NEWS = 1000  # most events, measurements and warnings that wait for the next news, which is sent with each message

FromRuntime = PromptFeatures | Verdict | Rested | Due | Overdue | Close


class DraftingEnd:
    """The end of a link at which a drafter works: the mailbox to which its actor sends; called with their events."""

    def __init__(self, link: Link, clock: Callable[[], float]) -> None:
        """Make the end of a link to the runtime; `clock` is the drafter's worker's, in seconds."""
        self.prices = Prices(tell=self._note_measurement)  # of this end. Both ends tell each other what they measure.
        self.wants_instants = False  # whether the runtime has a trace; see `protocol.trace.Events`
        self.link = link
        self._clock = clock
        self._queue = TargetQueue(self.prices.verify)
        self._actor: DraftActor | None = None
        self._proposed: dict[int, None] = {}
        self._measured = deque[Measurement](maxlen=MAX_NEWS)
        self._events = deque[Event](maxlen=MAX_NEWS)
        self.warnings = deque[str](maxlen=MAX_NEWS)  # for the runtime to log
        self._sessions: dict[int, Session] = {}
        self._told: dict[int, tuple[int, ...]] = {}  # the counts of these sessions that the other end knows

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def send_nowait(self, message: Message, /) -> None:
        if isinstance(message, Proposal):
            # Passes without this drafter's sessions are unknown here. Its sessions are taken to share one from now on.
            self._queue.enter(message.session, 1 + len(message.tokens))
            self._proposed[message.session] = None
            self._queue.begin(self._proposed, self._clock())
        if isinstance(message, Withdraw):
            self._send_news((message.session,))  # nothing is counted of the session afterwards
        self.link.send(encode(message))
        self._send_news((message.session,))

    async def beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            if not self.link.is_behind:
                self._send_news(self._sessions)
            await trio.sleep(BEAT_S)

    async def serve(
        self,
        model: Model,
        worker: Worker,
        *,
        vocab_size: int,
        make_policy: MakePolicy,
        max_batch: int,
        cache_bytes: int,
    ) -> None:
        """Draft until the link is closed. Cancellation: running jobs finish, and sessions' caches are closed."""
        self._actor = actor = DraftActor(
            model,
            worker,
            self,
            self.prices,
            target=self,
            target_vocab_size=vocab_size,
            make_policy=make_policy,
            prefix_cache_bytes=cache_bytes,
            target_queue=self._queue,
            max_batch=max_batch,
            max_drawn_from=MAX_DRAWN_FROM,
        )
        self._queue.max_batch = max_batch
        async with trio.open_nursery() as nursery:
            await nursery.start(actor.serve)
            try:
                while True:
                    self._take(decode(await self.link.receive()), actor)
            except OutriderError as error:
                ended = error  # collected here, since the nursery would wrap it in an exception group
            nursery.cancel_scope.cancel()
        raise ended

    def _take(self, message: LinkMessage, actor: DraftActor) -> None:
        if isinstance(message, TargetNews):
            now_s, self.prices.num_texts = self._clock(), message.num_texts
            for measured in message.measured:
                self.prices.take(aged(measured, now_s))
        elif isinstance(message, Open):
            if message.session in self._sessions:
                raise ProtocolError(f"session {message.session} was opened twice")
            commits, _ = trio.open_memory_channel[Commit](0)
            self._sessions[message.session] = shared = Session(message, commits)
            shared.on_left = partial(self._left, message.session)
            actor.open_session(shared)
        elif isinstance(message, FromRuntime):
            if not isinstance(message, PromptFeatures | Due):
                self._judged(message.session)
            if isinstance(message, Close) and (session := self._sessions.get(message.session)) is not None:
                session.is_unwanted = True  # a session that begins now may reuse what this one has read
            actor.mailbox.send_nowait(message)
        else:
            raise ProtocolError(f"a drafter was sent {message!r:.200}")

    def _judged(self, session: int) -> None:
        """Note that the target has no pass to do for a session."""
        self._proposed.pop(session, None)
        self._queue.leave(session, self._clock())

    def _left(self, session: int) -> None:
        self._judged(session)
        self._send_news((session,))
        self._sessions.pop(session).end()
        self._told.pop(session, None)

    def _note_measurement(self, measured: Measurement) -> None:
        if measured.kind in OF_DRAFTER:  # and not what the other end has told
            self._measured.append(measured)

    def _send_news(self, sessions: Iterable[int]) -> None:
        now_s, prices = self._clock(), self.prices
        news = DraftNews(
            tuple(aged(measured, now_s) for measured in self._measured),
            tuple(aged(event, now_s) for event in self._events),
            tuple((session, *grown) for session in sessions if any(grown := self._grown(session))),
            prices.acceptance,
            prices.hit_rate.value if prices.hit_rate.is_known else None,
            prices.drafts_together,
            self._actor is None or self._actor.is_alive,
            tuple(self.warnings),
        )
        for told in (self._measured, self._events, self.warnings):
            told.clear()
        self.link.send(encode(news))

    def _grown(self, session: int) -> tuple[int, ...]:
        shared, told = self._sessions.get(session), self._told.get(session, (0,) * len(COUNTED))
        if shared is None:
            return ()
        self._told[session] = counts = tuple(getattr(shared.counts, name) for name in COUNTED)
        return tuple(count - before for count, before in zip(counts, told, strict=True))
