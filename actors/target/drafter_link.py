"""The target's link to the drafter: messages to it, and how long its proposals are waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from actors.target.target_session import TargetSession
from protocol.deadlines import ROUNDS_ALONE, prompt_wait_s, proposal_wait_s
from protocol.messages import Due, Message, Overdue
from protocol.prices import Prices
from protocol.session_state import SessionPhase
from protocol.settings import MAX_LOOKAHEAD

# Checkpoints within which a proposal that exists already arrives: into the drafter's mailbox, and back.
CHECKPOINTS_PER_ANSWER = 4


class DrafterLink:
    """The drafter as the target sees it: a mailbox for messages, and proposals that arrive in the sessions' states.

    Waiting never changes the text. A drafter that is late is left behind for a round or two (`protocol.deadlines`), and
    one that is gone is not waited for.

    Attributes:
        mailbox: the drafter's; None while there is no drafter, and then messages to it are dropped.
        has_model: whether there is a drafter with a model, which works at the same time as the target's.
    """

    def __init__(
        self, sessions: Mapping[int, TargetSession], prices: Prices, on_overdue: Callable[[TargetSession], None]
    ) -> None:
        """A link without a drafter.

        Args:
            sessions: the target's sessions that are under way, by id.
            prices: measured costs of both models.
            on_overdue: called when a session's proposal is late, before the drafter is asked for it.
        """
        self.mailbox: trio.MemorySendChannel[Message] | None = None
        self.has_model = False
        self._sessions = sessions
        self._prices = prices
        self._on_overdue = on_overdue

    def attach(self, mailbox: trio.MemorySendChannel[Message], *, has_model: bool) -> None:
        """Send messages to this drafter from now on."""
        self.mailbox, self.has_model = mailbox, has_model

    def detach(self) -> None:
        """Send messages to nobody from now on."""
        self.mailbox, self.has_model = None, False

    def send(self, message: Message) -> None:
        """Send a message to the drafter, if there is one. Never waits."""
        if self.mailbox is not None:
            self.mailbox.send_nowait(message)

    async def wait_for_proposal(self, session: TargetSession) -> None:
        """Wait until the drafter has proposed or left the round to the target, or the time is up.

        The session's unsent commit is delivered meanwhile.
        """
        for _ in range(CHECKPOINTS_PER_ANSWER):
            if session.state.phase is not SessionPhase.PROPOSING:
                return
            await trio.lowlevel.checkpoint()
        began, session.awaits_proposal = trio.current_time(), True
        while session.state.phase is SessionPhase.PROPOSING:
            # Computed anew each time, since the drafter may have become ready meanwhile.
            deadline = began + self._proposal_timeout_s(session)
            with trio.move_on_at(deadline):
                await session.shared.deliver()
                await session.change()
            is_late = trio.current_time() >= began + self._proposal_timeout_s(session)
            if session.state.phase is SessionPhase.PROPOSING and is_late:
                await self._time_out_proposal(session)
        session.awaits_proposal = False

    async def _time_out_proposal(self, session: TargetSession) -> None:
        """Ask the drafter for what it has by now, if it has read the prompt; decode alone afterwards."""
        session.shared.counts.draft_timeouts += 1
        self._on_overdue(session)
        has_read_the_prompt = session.is_drafter_ready
        session.is_drafter_ready, session.decodes_alone = False, True
        if not has_read_the_prompt:
            self.leave_behind(session)
        elif self.mailbox is not None:
            self.send(Due(session.id, session.state.round))
            while session.state.phase is SessionPhase.PROPOSING:  # for a few turns of the event loop
                await session.change()

    def _proposal_timeout_s(self, session: TargetSession) -> float:
        """Seconds to wait for the drafter."""
        if not session.is_drafter_ready:
            return prompt_wait_s(self._prices)
        lookahead = session.shared.opened.settings.lookahead
        num_steps = MAX_LOOKAHEAD if lookahead == "auto" else max(1, lookahead)
        return proposal_wait_s(self._prices, num_steps, len(self._sessions))

    def leave_behind(self, session: TargetSession) -> None:
        """Have the target decode alone for another round or two, because the drafter is overdue."""
        # Always for one round more than the one that begins, so that decoding can be a pass ahead.
        if session.state.rests_until - session.state.round < ROUNDS_ALONE:
            overdue = Overdue(session.id, session.state.round + ROUNDS_ALONE)
            if session.state.rest(overdue):
                self.send(overdue)

    def can_hurry(self, session_id: int) -> bool:
        """Whether a session's drafter can be asked for what it has drafted by now."""
        session = self._sessions.get(session_id)
        return (
            session is not None
            and session.state.phase is SessionPhase.PROPOSING
            and session.awaits_proposal
            and session.is_drafter_ready
            # A fixed lookahead is what the user wants, however long it takes.
            and session.shared.opened.settings.lookahead == "auto"
        )

    def hurry(self, session_id: int) -> None:
        """Ask a session's drafter for what it has drafted by now."""
        self.send(Due(session_id, self._sessions[session_id].state.round, is_late=False))
