"""The state machine of one session. Each actor keeps a copy, and both see the same messages.

A session is in one of five phases:

    PROPOSING    it is the drafter's turn; where a session with a drafter begins
    VERIFYING    it is the target's turn to answer the outstanding proposal
    RESTING      for some rounds the target decodes alone, and the drafter may come back; where a session begins whose
                 first round is the target's
    UNDRAFTED    the target decodes alone to the end; where a session without a drafter begins
    CLOSED       the session is over

Messages move it from phase to phase:

    in phase     message    next phase
    PROPOSING    Proposal   VERIFYING
    PROPOSING    Rest       RESTING      the drafter leaves some rounds to the target
    PROPOSING    Overdue    RESTING      the target stops waiting, and decodes some rounds alone
    PROPOSING    Withdraw   UNDRAFTED    the drafter leaves for good
    VERIFYING    Verdict    PROPOSING    tokens are committed, and the next round begins
    VERIFYING    Overdue    RESTING      the proposal came too late (the drafter's copy only), or its pass failed
    VERIFYING    Withdraw   UNDRAFTED    the next verdict still answers the outstanding proposal
    RESTING      Verdict    RESTING      or PROPOSING, if the next round is the one that ends the rest
    RESTING      Rested     RESTING      likewise, for several rounds (in the drafter's copy only)
    RESTING      Rest       RESTING      the rest is prolonged
    RESTING      Overdue    RESTING      likewise
    RESTING      Withdraw   UNDRAFTED
    UNDRAFTED    Verdict    UNDRAFTED
    UNDRAFTED    Rested     UNDRAFTED    sent before the target knew of the withdrawal
    any          Close      CLOSED

A verdict that ends the text closes the session, too; closing it once more changes nothing.

`TRANSITIONS` is this table. A message that it does not list for the present phase is a `ProtocolError`, and so is one
of a future round. A message of a round that is *over* is no error, since asynchronous messages can be late or
duplicated: it is dropped and counted (`num_stale`). Once the session is closed, all rounds are over.
"""

from __future__ import annotations

import enum
from typing import Literal

import attrs

from protocol.copying import DraftedBy
from protocol.errors import ProtocolError
from protocol.messages import Close, Likelihood, Message, Open, Overdue, Proposal, Rest, Rested, Verdict, Withdraw

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
    (SessionPhase.RESTING, Verdict): SessionPhase.RESTING,  # `apply` moves on to PROPOSING where the rest ends
    (SessionPhase.UNDRAFTED, Rested): SessionPhase.UNDRAFTED,
    (SessionPhase.RESTING, Rested): SessionPhase.RESTING,  # likewise
    (SessionPhase.PROPOSING, Overdue): SessionPhase.RESTING,
    (SessionPhase.VERIFYING, Overdue): SessionPhase.RESTING,
    (SessionPhase.RESTING, Overdue): SessionPhase.RESTING,
    (SessionPhase.PROPOSING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.RESTING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.VERIFYING, Withdraw): SessionPhase.UNDRAFTED,
    (SessionPhase.UNDRAFTED, Verdict): SessionPhase.UNDRAFTED,
    **{(phase, Close): SessionPhase.CLOSED for phase in SessionPhase if phase is not SessionPhase.CLOSED},
}


@attrs.frozen
class Commit:
    """What one round added to the text, cut at the first stop.

    Attributes:
        start: absolute position of the first token.
        tokens: at least one.
        num_from_draft: how many of the tokens, from the front, the drafter had proposed.
        num_rejected: judged tokens that were rejected, or came after a rejected one. Tokens proposed beyond the end of
            the text do not count, nor do those that the target left out.
        num_stale: judged tokens, from the front, that were stale; see `Proposal.num_stale`.
        drafters: for each judged token who drafted it; see `Proposal.drafters`.
        bonus: whether the last token is the target's own after a full acceptance.
        single_step, settles: as in the verdict.
        resting: whether the target decoded the round alone because the drafter rested or was late.
        finish_reason: why the text ends with the last token; None if it goes on.
        likelihoods: one for each token, if the session asks for log-probabilities; else empty.
        stop_reason: the user's stop string or stop token that ended the text.
    """

    session: int
    round: int
    start: int
    tokens: tuple[int, ...]
    num_from_draft: int
    num_rejected: int = 0
    num_stale: int = 0
    bonus: bool = False
    single_step: bool = False
    settles: bool = False
    resting: bool = False
    finish_reason: FinishReason | None = None
    likelihoods: tuple[Likelihood, ...] = ()
    stop_reason: str | int | None = None
    drafters: tuple[DraftedBy, ...] = ()

    def drafted_by(self, index: int) -> DraftedBy | None:
        """Who drafted the token at an index; None for the target's own."""
        if index >= self.num_from_draft:
            return None
        return self.drafters[index] if self.drafters else "model"


class SessionState:
    """One actor's copy of a session's state."""

    def __init__(self, opened: Open) -> None:
        self.opened = opened  # the message that began the session
        self.rests_until = 1 if opened.target_begins else 0  # the first round after the last rest; 0 if there was none
        begins = SessionPhase.RESTING if opened.target_begins else SessionPhase.PROPOSING
        self.phase = begins if opened.drafted else SessionPhase.UNDRAFTED
        self.round = 0  # the round that is under way, from 0
        self.committed: list[int] = list(opened.prompt)  # the text so far, prompt included. It only ever grows.
        self.outstanding: Proposal | None = None  # the proposal that awaits its verdict, or None
        self.finish_reason: FinishReason | None = None  # why the text ended, or None so far
        self.num_stale = 0  # messages that were dropped because their round was over
        bounds = [opened.context_length]
        if opened.settings.max_tokens is not None:
            bounds.append(len(opened.prompt) + opened.settings.max_tokens)
        self._max_committed = min((bound for bound in bounds if bound is not None), default=None)

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
        """How many more tokens may be committed, >= 0; None if there is no bound."""
        return None if self._max_committed is None else self._max_committed - len(self.committed)

    def is_stale(self, message: Proposal | Verdict) -> bool:
        """Whether a message's round is over, which is counted.

        Raises: ProtocolError: it is of another session, of a future round, or of this round from another position.
        """
        if message.session != self.opened.session:
            raise ProtocolError(f"session {self.opened.session} got a message of another session: {message!r}")
        over = (
            message.round < self.round
            or self.phase is SessionPhase.CLOSED
            # A second copy of the outstanding proposal, or one from before the drafter withdrew.
            or (isinstance(message, Proposal) and self.phase is not SessionPhase.PROPOSING)
        )
        # In a closed session every round is over, even a future one: in a rest, the other side may be rounds ahead.
        if over and (message.round <= self.round or self.phase is SessionPhase.CLOSED):
            self.num_stale += 1
            return True
        if message.round != self.round or message.start != self.next_position:
            raise ProtocolError(
                f"session {self.opened.session} is in round {self.round} at position "
                f"{self.next_position}, and got {message!r}"
            )
        return False

    def propose(self, proposal: Proposal) -> bool:
        """Record the drafter's proposal. Returns: False if it was stale, so that nothing has changed."""
        if self.is_stale(proposal):
            return False
        self._move(proposal)
        self.outstanding = proposal
        return True

    def rest(self, message: Rest | Overdue) -> bool:
        """Leave the rounds before `message.until` to the target alone. False if they are over; then nothing changes."""
        is_over = message.until <= max(self.round, self.rests_until)
        if is_over or self.phase in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED):
            return False
        self._move(message)
        self.rests_until = message.until
        self.outstanding = None
        return True

    def withdraw(self, message: Withdraw) -> None:
        """The drafter leaves for good; its outstanding proposal stays."""
        if self.phase not in (SessionPhase.UNDRAFTED, SessionPhase.CLOSED):
            self._move(message)

    def close(self, message: Close) -> None:
        """End the session; does nothing if it is over."""
        if self.phase is not SessionPhase.CLOSED:
            self._move(message)

    def preview(self, verdict: Verdict) -> Commit:
        """What a verdict on the current round would commit; changes nothing.

        Raises: ProtocolError: it accepts or judges more tokens than were proposed, or ends the text beyond its tokens.
        """
        proposed = self.outstanding.tokens if self.outstanding else ()
        for number, does in ((verdict.num_accepted, "accepts"), (verdict.num_judged or 0, "judges")):
            if number > len(proposed):
                raise ProtocolError(f"{verdict!r} {does} more than the {len(proposed)} tokens that were proposed")
        opened, outstanding, remaining = self.opened, self.outstanding, self.remaining
        tokens = proposed[: verdict.num_accepted]
        if verdict.token is not None:
            tokens += (verdict.token,)
        num_tokens = len(tokens) if remaining is None else min(len(tokens), remaining)
        finish_reason: FinishReason | None = "length" if remaining is not None and num_tokens == remaining else None
        stop_reason: str | int | None = None
        for i, token in enumerate(tokens[:num_tokens]):
            if token in opened.stop_tokens:
                num_tokens, finish_reason = i + 1, "stop"
                stop_reason = token if token in opened.settings.stop_tokens else None
                break
        if verdict.stop is not None:
            if verdict.stop.num_tokens > num_tokens:
                raise ProtocolError(f"{verdict!r} ends the text beyond the {num_tokens} tokens that it commits")
            num_tokens, finish_reason, stop_reason = verdict.stop.num_tokens, "stop", verdict.stop.text
        num_judged = 1 if verdict.single_step and proposed else len(proposed)
        if verdict.num_judged is not None:
            num_judged = verdict.num_judged
        has_own_token = num_tokens == verdict.num_accepted + 1  # the verdict's own token was not cut off
        return Commit(
            verdict.session,
            verdict.round,
            verdict.start,
            tokens[:num_tokens],
            num_from_draft=min(num_tokens, verdict.num_accepted),
            num_rejected=num_judged - verdict.num_accepted if has_own_token else 0,
            num_stale=min(num_judged, outstanding.num_stale) if outstanding else 0,
            bonus=has_own_token and num_judged > 0 and num_judged == verdict.num_accepted,
            single_step=verdict.single_step,
            settles=verdict.settles,
            resting=self.phase is SessionPhase.RESTING,
            finish_reason=finish_reason,
            likelihoods=verdict.likelihoods[:num_tokens],
            stop_reason=stop_reason,
            drafters=outstanding.drafters[:num_judged] if outstanding else (),
        )

    def apply(self, verdict: Verdict) -> Commit | None:
        """Commit the tokens of a verdict, and begin the next round. None, and no change, if it was stale.

        Raises: ProtocolError: no verdict is due; or see `preview`.
        """
        if self.is_stale(verdict):
            return None
        commit = self.preview(verdict)
        self._move(verdict)
        self.committed += commit.tokens
        self.outstanding = None  # it was judged, or its drafter has left
        self._begin_round(self.round + 1)
        if commit.finish_reason is not None:
            self.finish_reason = commit.finish_reason
            self.close(Close(self.opened.session))
        return commit

    def follow(self, rested: Rested) -> bool:
        """Commit what the target has committed in some rounds of a rest. False, and no change, if they are over.

        Raises: ProtocolError: there is no rest, it ends before these rounds do, or the tokens do not follow the text.
        """
        if rested.round < self.round or self.phase is SessionPhase.CLOSED:
            self.num_stale += 1
            return False
        ends_early = self.phase is SessionPhase.RESTING and rested.round >= self.rests_until
        if rested.session != self.opened.session or rested.start != self.next_position or ends_early:
            raise ProtocolError(
                f"session {self.opened.session} is in round {self.round} at position {self.next_position}, rests until "
                f"{self.rests_until}, and got {rested!r}"
            )
        self._move(rested)
        self.committed += rested.tokens
        self._begin_round(rested.round + 1)
        return True

    def _begin_round(self, round: int) -> None:
        self.round = round
        if self.phase is SessionPhase.RESTING and round >= self.rests_until:
            self.phase = SessionPhase.PROPOSING

    def _move(self, message: Message) -> None:
        next_phase = TRANSITIONS.get((self.phase, type(message)))
        if next_phase is None:
            raise ProtocolError(f"session {self.opened.session} is {self.phase.value}, and got {message!r}")
        self.phase = next_phase
