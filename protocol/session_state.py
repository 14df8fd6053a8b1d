"""The state of one session, as a pure state machine of which each actor keeps a copy.

    state        event      next state
    PROPOSING    Proposal   VERIFYING     the drafter's turn is over
    VERIFYING    Verdict    PROPOSING     text is committed, or the session ends
    PROPOSING    Rest       RESTING       for some rounds the target goes alone
    RESTING      Rest       RESTING       … for some more
    RESTING      Verdict    RESTING       or PROPOSING, once those rounds are over
    PROPOSING    Overdue    RESTING       the target waits no longer, and goes alone for some rounds
    VERIFYING    Overdue    RESTING       … and what is on the table has come too late (the drafter's copy alone)
    RESTING      Overdue    RESTING
    PROPOSING    Withdraw   UNDRAFTED     from here on the target goes alone
    RESTING      Withdraw   UNDRAFTED
    VERIFYING    Withdraw   UNDRAFTED     … once it has judged what is on the table
    UNDRAFTED    Verdict    UNDRAFTED
    any          Close      CLOSED

What is not in `TRANSITIONS` is a `ProtocolError`, and so is a message from a round that has not come
yet. A message of this session from a round that is *over*, as all are once it is closed, is not an error:
late and duplicated messages are what asynchrony looks like. It is dropped and counted (`stale`).
"""

from __future__ import annotations

import enum
from typing import Literal

import attrs

from protocol.errors import ProtocolError
from protocol.messages import Close, Likelihood, Message, Open, Overdue, Proposal, Rest, Verdict, Withdraw

FinishReason = Literal["stop", "length"]


class SessionPhase(enum.Enum):
    """Whose turn it is; see the module's table."""

    PROPOSING = "proposing"
    VERIFYING = "verifying"
    RESTING = "resting"
    UNDRAFTED = "undrafted"
    CLOSED = "closed"


TRANSITIONS: dict[tuple[SessionPhase, type], SessionPhase] = {
    (SessionPhase.PROPOSING, Proposal): SessionPhase.VERIFYING,
    (SessionPhase.VERIFYING, Verdict): SessionPhase.PROPOSING,
    (SessionPhase.PROPOSING, Rest): SessionPhase.RESTING,
    (SessionPhase.RESTING, Rest): SessionPhase.RESTING,
    (SessionPhase.RESTING, Verdict): SessionPhase.RESTING,  # and on to PROPOSING in the round that ends the rest
    (SessionPhase.PROPOSING, Overdue): SessionPhase.RESTING,
    (SessionPhase.VERIFYING, Overdue): SessionPhase.RESTING,
    (SessionPhase.RESTING, Overdue): SessionPhase.RESTING,
    (SessionPhase.PROPOSING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.RESTING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.VERIFYING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.UNDRAFTED, Verdict): SessionPhase.UNDRAFTED,
    (SessionPhase.PROPOSING, Close): SessionPhase.CLOSED,
    (SessionPhase.VERIFYING, Close): SessionPhase.CLOSED,
    (SessionPhase.RESTING, Close): SessionPhase.CLOSED,
    (SessionPhase.UNDRAFTED, Close): SessionPhase.CLOSED,
}


@attrs.frozen
class Commit:
    """What one round added to the text, cut at the first stop.

    Attributes:
        session, round: which round it was.
        start: absolute position of the first token.
        tokens: one at least.
        num_from_draft: how many of them, from the front, the drafter had proposed.
        num_rejected: proposed tokens that were judged and fell, or fell with one that did. Tokens
            proposed beyond the end of the text were never needed and do not count.
        bonus: whether the last token is the target's own after a full acceptance.
        single_step, settles: as in the verdict.
        resting: whether the target had the round to itself: the drafter had left it, or was late.
        finish_reason: why the text ends with the last token, or None where it goes on.
        likelihoods: of the tokens, where the session asks for log-probabilities.
        stop_reason: the stop string or stop token that the user named and that ended it. None for the tokenizer's
            own end of the text, unless it is among the user's stop tokens too.
    """

    session: int
    round: int
    start: int
    tokens: tuple[int, ...]
    num_from_draft: int
    num_rejected: int = 0
    bonus: bool = False
    single_step: bool = False
    settles: bool = False
    resting: bool = False
    finish_reason: FinishReason | None = None
    likelihoods: tuple[Likelihood, ...] = ()
    stop_reason: str | int | None = None


class SessionState:
    """One actor's copy of a session's state.

    Attributes:
        opened: the message that began the session.
        state: see the module's table.
        round: the round that is under way, from 0.
        committed: the text so far, prompt included. It only ever grows.
        outstanding: the proposal that awaits its verdict, or None.
        rests_until: the round that ends the last rest.
        finish_reason: set by the commit that ended the text.
        num_stale: messages dropped because their round was over.
    """

    def __init__(self, opened: Open) -> None:
        self.opened = opened
        self.phase = SessionPhase.PROPOSING if opened.drafted else SessionPhase.UNDRAFTED
        self.round = 0
        self.committed: list[int] = list(opened.prompt)
        self.outstanding: Proposal | None = None
        self.rests_until = 0
        self.finish_reason: FinishReason | None = None
        self.num_stale = 0

    @property
    def next_position(self) -> int:
        """Absolute position of the first token that is not committed."""
        return len(self.committed)

    @property
    def num_generated(self) -> int:
        """Tokens committed beyond the prompt."""
        return len(self.committed) - len(self.opened.prompt)

    @property
    def remaining(self) -> int | None:
        """How many more tokens may be committed, >= 0; None where nothing bounds them."""
        bounds = []
        if self.opened.settings.max_tokens is not None:
            bounds.append(self.opened.settings.max_tokens - self.opened.num_resumed - self.num_generated)
        if self.opened.context_length is not None:
            bounds.append(self.opened.context_length - len(self.committed))
        return min(bounds) if bounds else None

    def is_stale(self, message: Proposal | Verdict) -> bool:
        """Whether a message's round is over; counts it if so.

        Raises: ProtocolError: it is of another session, of a round to come, or of this round but from
            another position.
        """
        if message.session != self.opened.session:
            raise ProtocolError(f"session {self.opened.session} was handed {message!r}")
        over = (
            message.round < self.round
            or self.phase is SessionPhase.CLOSED
            # A second copy of the proposal on the table, or one from before the drafter withdrew.
            or (isinstance(message, Proposal) and self.phase is not SessionPhase.PROPOSING)
        )
        # Of a session that is closed, all rounds are over: in a rest, the other side may be some of them ahead.
        if over and (message.round <= self.round or self.phase is SessionPhase.CLOSED):
            self.num_stale += 1
            return True
        if message.round != self.round or message.start != self.next_position:
            raise ProtocolError(
                f"session {self.opened.session} is in round {self.round} at position "
                f"{self.next_position}, and was handed {message!r}"
            )
        return False

    def propose(self, proposal: Proposal) -> bool:
        """Put a proposal on the table. False if it was stale and nothing changed."""
        if self.is_stale(proposal):
            return False
        self._move(proposal)
        self.outstanding = proposal
        return True

    def rest(self, message: Rest | Overdue) -> bool:
        """Leave the rounds until another to the target alone. False if they are over and nothing changed."""
        if message.until <= max(self.round, self.rests_until) or self.phase in (
            SessionPhase.UNDRAFTED,
            SessionPhase.CLOSED,
        ):
            return False
        self._move(message)
        self.rests_until = message.until
        self.outstanding = None
        return True

    def withdraw(self, message: Withdraw) -> None:
        """The drafter leaves; what it has on the table stays there."""
        if self.phase not in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED):
            self._move(message)

    def close(self, message: Close) -> None:
        """The session is over. Closing twice is closing once."""
        if self.phase is not SessionPhase.CLOSED:
            self._move(message)

    def preview(self, verdict: Verdict) -> Commit:
        """What a verdict on the round that is under way would commit; changes nothing.

        Raises: ProtocolError: it accepts more than was proposed, or ends the text beyond what it commits.
        """
        proposed = self.outstanding.tokens if self.outstanding else ()
        if verdict.num_accepted > len(proposed):
            raise ProtocolError(f"{verdict!r} accepts more than the {len(proposed)} tokens that were proposed")
        return self._cut(verdict, proposed)

    def apply(self, verdict: Verdict) -> Commit | None:
        """Commit what a verdict says. None if it was stale and nothing changed.

        Raises: ProtocolError: no verdict is due, or it is one that `preview` refuses.
        """
        if self.is_stale(verdict):
            return None
        commit = self.preview(verdict)
        self._move(verdict)
        self.committed += commit.tokens
        self.outstanding = None
        self.round += 1
        if self.phase is SessionPhase.RESTING and self.round >= self.rests_until:
            self.phase = SessionPhase.PROPOSING
        if commit.finish_reason is not None:
            self.finish_reason = commit.finish_reason
            self.close(Close(self.opened.session))
        return commit

    def _cut(self, verdict: Verdict, proposed: tuple[int, ...]) -> Commit:
        """The round's tokens up to the first stop, or to the most that may be generated."""
        tokens = proposed[: verdict.num_accepted]
        if verdict.token is not None:
            tokens += (verdict.token,)
        remaining = self.remaining
        most = len(tokens) if remaining is None else min(len(tokens), remaining)
        finish_reason: FinishReason | None = "length" if remaining is not None and most == remaining else None
        stop_reason: str | int | None = None
        for i, token in enumerate(tokens[:most]):
            if token in self.opened.stop_tokens:
                most, finish_reason = i + 1, "stop"
                stop_reason = token if token in self.opened.settings.stop_tokens else None
                break
        if verdict.stop is not None:
            if verdict.stop.num_tokens > most:
                raise ProtocolError(f"{verdict!r} ends the text beyond the {most} tokens that it commits")
            most, finish_reason, stop_reason = verdict.stop.num_tokens, "stop", verdict.stop.text
        judged = 1 if verdict.single_step and proposed else len(proposed)
        whole = most == verdict.num_accepted + 1  # the verdict's own token is still in
        return Commit(
            session=verdict.session,
            round=verdict.round,
            start=verdict.start,
            tokens=tokens[:most],
            num_from_draft=min(most, verdict.num_accepted),
            num_rejected=judged - verdict.num_accepted if whole else 0,
            bonus=whole and judged > 0 and judged == verdict.num_accepted,
            single_step=verdict.single_step,
            settles=verdict.settles,
            resting=self.phase is SessionPhase.RESTING,
            finish_reason=finish_reason,
            likelihoods=verdict.likelihoods[:most],
            stop_reason=stop_reason,
        )

    def _move(self, message: Message) -> None:
        following = TRANSITIONS.get((self.phase, type(message)))
        if following is None:
            raise ProtocolError(f"session {self.opened.session} is {self.phase.value}; {message!r} has no place there")
        self.phase = following
