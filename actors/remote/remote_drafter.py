"""A drafter in another process, as the runtime and the target see it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import attrs
import trio

from actors.actor import Mailbox
from actors.remote.link import BEAT_S, Link, LinkLostError, aged
from actors.session import Session
from protocol.drafter_wire import COUNTED, DrafterLoaded, DraftNews, LinkMessage, TargetNews, decode, encode
from protocol.errors import ProtocolError
from protocol.lookahead_tree import withdrawal
from protocol.messages import Close, Due, Message, Overdue, Proposal, Ready, Rest, Rested, Verdict, Withdraw
from protocol.prices import OF_DRAFTER, Measurement, Prices
from protocol.session_state import SessionPhase, SessionState
from protocol.settings import MAX_LOOKAHEAD
from protocol.trace import ActorName as ActorName
from protocol.trace import Event, Span

logger = logging.getLogger("outrider")

# Most measurements that wait for the next message to the drafter. While it rests, messages may be rare.
MAX_MEASURED = 64
LEAVE_S = 0.5  # longest time in which a drafter that is detached may propose what it has drawn


@attrs.frozen
class LoadedElsewhere:
    """A drafter that was loaded at the other end of a link."""

    link: Link
    loaded: DrafterLoaded
    news: tuple[tuple[float, DraftNews], ...] = ()  # news while it loaded, and when they came, by the workers' clock


@attrs.define(eq=False)
class _Relayed:
    """What is known of a session from its messages."""

    shared: Session
    state: SessionState  # after the messages that were passed on, which is how far the drafter can be
    is_ready: bool = False  # the drafter has read the text
    is_leaving: bool = False  # the drafter was asked for what it has drawn, and the session is left then


class RemoteDrafter:
    """A drafter in another process: passes the messages of the sessions on. Its properties are those of an `Actor`.

    Once its link breaks, falls silent or brings nonsense, every session goes on without the drafter at once: only what
    has arrived is proposed. The other end handles errors of single sessions.
    """

    name: ActorName = "draft"

    def __init__(
        self,
        elsewhere: LoadedElsewhere,
        on_event: Callable[[Event], None],
        prices: Prices,
        clock: Callable[[], float],
        *,
        target: Mailbox,
        target_vocab_size: int,
    ) -> None:
        """Stand for a drafter that was loaded elsewhere; args as of `DraftActor`."""
        self.busy_seconds = 0.0
        self._link, self._first_news = elsewhere.link, elsewhere.news
        self._on_event = on_event
        self._prices = prices
        self._clock = clock
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._sessions: dict[int, _Relayed] = {}
        self._measured = deque[Measurement](maxlen=MAX_MEASURED)
        self.is_serving, self._is_alive = False, True

    # --- what the runtime asks --------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the drafter can do its work. May be read in any thread."""
        return self.is_serving and self._is_alive

    @property
    def mailbox(self) -> Mailbox:
        """Where the target sends its messages."""
        return self

    @trio.lowlevel.enable_ki_protection
    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Pass messages on until cancelled. Cancellation: sessions that the drafter is to leave wait for what it has
        drawn, for at most `LEAVE_S`.
        """
        now_s = self._clock()
        self._measured.extend(attrs.evolve(each, ended_s=now_s) for each in self._prices.known_of_target())
        self._prices.tell = self._note_measurement
        for arrived_s, news in self._first_news:
            self._take_news(news, arrived_s)
        self.is_serving = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._link.run)
                nursery.start_soon(self._beat)
                task_status.started()
                try:
                    await self._receive()
                except (LinkLostError, ProtocolError) as error:
                    self._lose(error)
                nursery.cancel_scope.cancel()
            await trio.sleep_forever()
        finally:
            self.is_serving, self._prices.tell = False, lambda measured: None
            self._link.close()
            for session in list(self._sessions.values()):
                self._forget(session)

    async def _receive(self) -> None:
        try:
            while True:
                self._take(decode(await self._link.receive()))
        except trio.Cancelled:
            with trio.move_on_after(LEAVE_S, shield=True):
                while any(session.is_leaving for session in self._sessions.values()):
                    self._take(decode(await self._link.receive()))
            for session in list(self._sessions.values()):
                if session.is_leaving:
                    self._withdraw(session)
            raise

    async def _beat(self) -> None:
        while True:
            if not self._link.is_behind:
                self._send_news()
            await trio.sleep(BEAT_S)

    def open_session(self, shared: Session) -> None:
        session = _Relayed(shared, SessionState(shared.opened))
        self._sessions[shared.opened.session] = session
        shared.join()
        self._link.send(encode(shared.opened))

    def close_session(self, message: Close) -> None:
        self.send_nowait(message)

    def withdraw_from_all(self) -> None:
        """Leave every session to the target, at a moment that a user has chosen. Never waits. If it is the drafter's
        turn, it first proposes what it has drawn: a chain that ends the text is ready sooner.
        """
        for session in list(self._sessions.values()):
            if session.state.phase is SessionPhase.PROPOSING and session.is_ready:
                session.is_leaving = True
                self._link.send(encode(Due(session.state.opened.session, session.state.round, is_late=False)))
            else:
                self._withdraw(session)

    # --- from the target --------------------------------------------------------------------------

    def send_nowait(self, message: Message, /) -> None:
        if (session := self._sessions.get(message.session)) is None:
            return
        try:
            match message:
                case Verdict():
                    session.state.apply(message)
                case Rested():
                    session.state.follow(message)
                case Overdue():
                    session.state.rest(message)
                case Close():
                    session.state.close(message)
        except ProtocolError as error:
            logger.warning("drafting failed, session %d goes on without: %s", message.session, error)
            session.shared.counts.draft_failures += 1
            self._withdraw(session)
            return
        if not isinstance(message, Close):
            self._link.send(encode(message))
        if session.state.phase is SessionPhase.CLOSED:
            self._forget(session)
        if self._measured:
            self._send_news()

    def _note_measurement(self, measured: Measurement) -> None:
        if measured.kind not in OF_DRAFTER:  # and not what the other end has told
            self._measured.append(measured)

    def _send_news(self) -> None:
        now_s = self._clock()
        measured = tuple(aged(each, now_s) for each in self._measured)
        self._measured.clear()
        self._link.send(encode(TargetNews(measured, self._prices.num_texts)))

    # --- from the drafter -------------------------------------------------------------------------

    def _take(self, message: LinkMessage) -> None:
        if isinstance(message, DraftNews):
            self._take_news(message, self._clock())
            return
        if not isinstance(message, Proposal | Ready | Rest | Withdraw):
            raise ProtocolError(f"a drafter sent {message!r:.200}")
        if (session := self._sessions.get(message.session)) is None:
            return  # it is over, which the drafter did not know yet
        match message:
            case Proposal():
                self._check(session, message)
                session.state.propose(message)
            case Ready():
                session.is_ready = True
            case Rest():
                session.state.rest(message)
            case Withdraw():
                self._withdraw(session)
                return
        self._target.send_nowait(message)
        if session.is_leaving and isinstance(message, Proposal | Rest):
            self._withdraw(session)

    def _check(self, session: _Relayed, proposal: Proposal) -> None:
        """Raises: ProtocolError: what is proposed cannot be judged."""
        tokens, probs, size = proposal.tokens, proposal.probs, self._target_vocab_size
        is_drawn = session.state.opened.settings.rule != "match" and bool(tokens)
        widths = [each.size for each in probs if each is not None]
        if (
            len(tokens) > MAX_LOOKAHEAD
            or any(token >= size for token in tokens)
            or bool(probs) != is_drawn
            or any(width > size for width in widths)
        ):
            raise ProtocolError(f"a drafter for {size} tokens sent {proposal!r:.200}")

    def _take_news(self, news: DraftNews, now_s: float) -> None:
        self._is_alive = news.is_alive
        for measured in news.measured:
            self._prices.take(aged(measured, now_s))
        self._prices.take_drafter(news.acceptance, news.hit_rate, drafts_together=news.drafts_together)
        for id, *grown in news.counts:
            if (session := self._sessions.get(id)) is not None:
                counts = session.shared.counts
                for name, more in zip(COUNTED, grown, strict=False):
                    setattr(counts, name, getattr(counts, name) + more)
        for event in news.events:
            if event.actor != self.name:
                raise ProtocolError(f"a drafter sent {event!r:.200}")
            if isinstance(event, Span):
                self.busy_seconds += event.began - event.ended
            self._on_event(aged(event, now_s))
        for text in news.warnings:
            logger.warning("at %s: %s", self._link.name, text)

    # --- the end ----------------------------------------------------------------------------------

    def _lose(self, error: LinkLostError | ProtocolError) -> None:
        self.is_serving = False
        how = f"{self._link.name} sent nonsense: {error}" if isinstance(error, ProtocolError) else error
        logger.warning("the drafter is lost: %s", how)
        for session in list(self._sessions.values()):
            session.shared.counts.draft_failures += 1
            self._withdraw(session)

    def _withdraw(self, session: _Relayed) -> None:
        if (message := withdrawal(session.state.opened.session, None)) is not None:
            self._target.send_nowait(message)
        self._forget(session)

    def _forget(self, session: _Relayed) -> None:
        id = session.state.opened.session
        del self._sessions[id]
        self._link.send(encode(Close(id)))
        session.shared.leave()
