"""The drafter without a model: proposes what a grammar forces, and what followed the same tokens earlier."""

from __future__ import annotations

from collections.abc import Callable

from actors.actor import Mailbox
from actors.drafters.drafter import Drafter, DrafterSession, MakePolicy, policy_by_settings
from actors.session import Session
from protocol.auto_policy import AutoPolicy
from protocol.draft_plan import Standing
from protocol.errors import ProtocolError
from protocol.messages import Due, Message, Overdue, Ready, Rested, Verdict
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.trace import Event


class LookupActor(Drafter[DrafterSession]):
    """Drafts for all sessions by lookup. It has no model and no thread, and answers a verdict as it receives it."""

    name = "draft"
    # Prolonged in each round without a proposal, and early enough for the target to decode a pass ahead.
    rest_rounds = max_rest_rounds = 3
    busy_seconds = 0.0  # there are no jobs

    def __init__(
        self,
        on_event: Callable[[Event], None],
        prices: Prices,
        clock: Callable[[], float],
        *,
        target: Mailbox,
        target_vocab_size: int,
        make_policy: MakePolicy = policy_by_settings,
        grammar_only: bool = False,
    ) -> None:
        """As `DraftActor`, without a model; `grammar_only` says that nothing is copied."""
        super().__init__(on_event, prices, clock)
        self._target = target
        self._target_vocab_size = target_vocab_size
        self._make_policy = make_policy
        self._grammar_only = grammar_only

    def _new_session(self, shared: Session) -> DrafterSession:
        # A lookup takes next to no time, and no other duration is ever measured.
        self.prices.observe_draft_step(1, 0.0, 0.0, beside_target=False)
        policy = self._make_policy(shared.opened.settings, self.prices)
        if isinstance(policy, AutoPolicy):
            policy.only_copies = True
        return DrafterSession(shared, policy, self._target_vocab_size, has_model=False, grammar_only=self._grammar_only)

    async def _turn(self) -> None:
        if not self._changed:
            await self._wait()
        while self._changed:
            session = next(iter(self._changed))
            del self._changed[session]
            if not (session.has_left or session.is_ready):
                self._begin(session)
            if session.has_left:
                await self._let_go(session)

    def _begin(self, session: DrafterSession) -> None:
        session.standing = Standing.READY
        self._target.send_nowait(Ready(session.id))
        try:
            session.copy()
            self._answer(session)
        except Exception as error:  # of any kind: it costs speed, never text
            self._give_up(session, error)

    def _receive(self, session: DrafterSession, message: Message) -> None:
        match message:
            case Verdict() | Rested():
                self._receive_verdict(session, message)
            case Due():  # lookup answers at once, so this message and the answer have crossed
                if message.is_late:
                    self._target.send_nowait(Ready(session.id))
            case Overdue():
                session.state.rest(message)
            case _:
                raise ProtocolError(f"the drafter cannot handle {message!r}")

    def _receive_verdict(self, session: DrafterSession, verdict: Verdict | Rested) -> None:
        was_resting = session.state.phase is SessionPhase.RESTING
        commit = self._follow(session, verdict)
        if commit is None or commit.finish_reason is not None:
            return
        was_hit = session.follow(commit)
        if not session.is_ready:
            return
        if not was_resting:
            self._count_hit(session, verdict.round, was_hit)
        self._answer(session)

    def _answer(self, session: DrafterSession) -> None:
        """Propose the found tokens; or rest, if nothing has been found for a while."""
        nodes = session.policy.proposal(session.view(self._clock())) or []
        is_idle = not nodes and session.num_idle_rounds >= self._max_idle_rounds
        if is_idle and isinstance(session.policy, AutoPolicy):
            self._rest(session)
        elif session.state.phase is SessionPhase.PROPOSING:
            self._send_proposal(session, session.proposal(nodes))
