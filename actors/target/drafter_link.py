"""The target's link to the drafter: messages to it, and how long to wait for its proposals."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from actors.actor import Mailbox
from actors.target.target_session import TargetSession
from protocol.deadlines import ROUNDS_ALONE, prompt_wait_s, proposal_wait_s
from protocol.messages import TELL_BEFORE_END, Due, Message, Overdue, Rested, Verdict
from protocol.prices import Prices
from protocol.session_state import Commit, SessionPhase
from protocol.settings import MAX_LOOKAHEAD


def _nothing() -> None: ...


@attrs.define(eq=False)
class DrafterLink:
    """The drafter as the target sees it: a mailbox for messages, and proposals that arrive in the sessions' states."""

    _num_sessions: Callable[[], int]  # how many sessions are under way
    _prices: Prices
    _on_overdue: Callable[[TargetSession], None]  # called when a proposal is late, before the drafter is asked for it
    mailbox: Mailbox | None = None  # the drafter's; None while there is none: messages to it are dropped
    has_model: bool = False  # whether there is a drafter with a model, which works at the same time as the target's
    # Has a drafter in this process take in what it was sent, and answer what it can at once. Never waits.
    take_messages: Callable[[], None] = _nothing

    def attach(self, mailbox: Mailbox, *, has_model: bool, take_messages: Callable[[], None] | None = None) -> None:
        """Send messages to this drafter from now on; `take_messages` has one in this process take them in at once."""
        self.mailbox, self.has_model, self.take_messages = mailbox, has_model, take_messages or _nothing

    def detach(self) -> None:
        """Send messages to nobody from now on."""
        self.mailbox, self.has_model, self.take_messages = None, False, _nothing

    def send(self, message: Message) -> None:
        """Send a message to the drafter, if there is one. Never waits."""
        if self.mailbox is not None:
            self.mailbox.send_nowait(message)

    def send_verdict(self, session: TargetSession, verdict: Verdict, commit: Commit) -> None:
        """Tell the drafter of a verdict; of those in a rest, in one message shortly before it ends. Never waits."""
        state = session.state
        if verdict.features is None and state.phase is SessionPhase.RESTING:
            session.unreported += commit.tokens
            if state.rests_until - state.round > TELL_BEFORE_END:
                return
            tokens, session.unreported = session.unreported, ()
            self.send(Rested(session.id, commit.round, state.next_position - len(tokens), tokens))
            return
        if session.unreported:
            # These are from before this round, which ends the rest or the text.
            tokens, session.unreported = session.unreported, ()
            self.send(Rested(session.id, commit.round - 1, commit.start - len(tokens), tokens))
        self.send(verdict)

    def time_out(self, session: TargetSession) -> None:
        """Ask a late drafter for what it has drafted by now, if it has read the prompt; decode alone afterwards."""
        session.shared.counts.draft_timeouts += 1
        self._on_overdue(session)
        has_read_the_prompt = session.is_drafter_ready
        session.is_drafter_ready, session.decodes_alone = False, True
        if not has_read_the_prompt:
            self.leave_behind(session)
        else:
            self.send(Due(session.id, session.state.round))

    def timeout_s(self, session: TargetSession) -> float:
        """Seconds to wait for a proposal."""
        if not session.is_drafter_ready:
            return prompt_wait_s(self._prices)
        lookahead = session.settings.lookahead
        num_steps = MAX_LOOKAHEAD if lookahead == "auto" else max(1, lookahead)
        return proposal_wait_s(self._prices, num_steps, self._num_sessions())

    def leave_behind(self, session: TargetSession) -> None:
        """Have the target decode alone for some rounds, because the drafter is not waited for."""
        # At least one round more than the one that begins, so that the target can decode a pass ahead.
        if session.state.rests_until - session.state.round < ROUNDS_ALONE:
            overdue = Overdue(session.id, session.state.round + ROUNDS_ALONE)
            if session.state.rest(overdue):
                self.send(overdue)

    def can_hurry(self, session: TargetSession) -> bool:
        """Whether a drafter that is waited for can be asked for what it has drafted by now."""
        # A fixed lookahead is what the user wants, however long it takes.
        return session.is_drafter_ready and not session.was_asked and session.settings.lookahead == "auto"
