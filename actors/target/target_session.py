"""The target's state of one session."""

from __future__ import annotations

import attrs

from actors.actor import ActorSession
from actors.session import Session
from actors.target.plain_rows import PlainRow
from protocol.deadlines import ROUNDS_ALONE
from protocol.errors import ProtocolError
from protocol.messages import Message, Overdue, Proposal, Ready, Rest, Verdict, Withdraw
from protocol.pass_plan import ReadyRound
from protocol.prices import Mean
from protocol.replay import ReplayDebt
from protocol.session_state import SessionPhase


class TargetSession(ActorSession):
    """The state of one session at the target.

    Attributes:
        plain_row: the text's row in rounds without a proposal; made for the first of them.
        replay: decides when replayed tokens are settled.
        verify_seconds: spent on verify passes so far.
        reads_until: length of the part of the prompt that is to be read.
        has_read_prompt: whether it was read, and handed on to whoever waits for it.
        reads_alone: whether no other prompt may be read in its passes.
        failure: the error that ended the session, if one did.
        is_blocked: whether a slow consumer keeps the next round from beginning.
        awaits_proposal_since_s: when the wait for a proposal began, in seconds on the worker's clock; None in no wait.
        proposal_due_s: when that wait ends.
        was_asked: whether the drafter was asked for what it has drafted by now, because it was late.
        was_hurried: whether it was asked because other texts wait.
        is_drafter_ready: whether the drafter has read the text, so that its proposals can be waited for.
        decodes_alone: whether the target goes on without the drafter until the drafter is ready.
        untold: tokens that were committed in a rest, and that the drafter has not been told of.
        round_began_s, busy_before_s: when the round began, and the worker's busy seconds by then.
        last_pass_s: its share of the seconds of the last pass by `RoundJobs.run_pass`.
        drafting_share: the share of the texts in that pass that had drafted tokens, in [0, 1].
        pass_rounds, pass_rows: numbers of rounds and rows in that pass.
        ended_s: when that pass ended; None once the next round is ready.
        last_ready: the round that took part in it.
        turnaround_s: mean time from the end of a pass until the next round is ready.
        has_shared: whether the text has shared a pass.
        was_plain: whether the round before had no proposal.
        was_single_step: whether the last verify pass could not have been undone.
        goes_alone: whether the next pass of the text is its own, because one that it shared has failed.
        rounds_undrafted: rounds without drafted tokens after the next pass with some that fails.
        reads_again: whether the cache has lost committed tokens because a pass has failed.
    """

    def __init__(self, shared: Session) -> None:
        super().__init__(shared)
        self.plain_row: PlainRow | None = None
        self.replay = ReplayDebt()
        self.verify_seconds = 0.0
        self.reads_until = 0
        self.has_read_prompt = False
        self.reads_alone = False
        self.failure: Exception | None = None
        self.is_blocked = False
        self.awaits_proposal_since_s: float | None = None
        self.proposal_due_s = 0.0
        self.was_asked = self.was_hurried = False
        self.is_drafter_ready = False
        self.decodes_alone = False
        self.untold: tuple[int, ...] = ()
        self.round_began_s = self.busy_before_s = 0.0
        self.last_pass_s = 0.0
        self.drafting_share = 0.0
        self.pass_rounds = self.pass_rows = 0
        self.ended_s: float | None = None
        self.last_ready = ReadyRound(1)
        self.turnaround_s = Mean(memory=8.0)
        self.has_shared = False
        self.was_plain = False
        self.was_single_step = False
        self.goes_alone = False
        self.rounds_undrafted = ROUNDS_ALONE
        self.reads_again = False

    def notice_loss(self) -> bool:
        """See `ActorSession.notice_loss`."""
        if not super().notice_loss():
            return False
        self.reads_again = True
        self.plain_row = None  # it may be ahead, in the cache that was lost
        return True

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to do but to close the cache."""
        return self.failure is not None or self.state.phase is SessionPhase.CLOSED

    @property
    def is_row(self) -> bool:
        """Whether its text is a row of the batch; to be asked while no pass runs."""
        return self.sequence is not None and self.sequence.is_row

    @property
    def num_to_read(self) -> int:
        """Tokens of the prompt that are to be read."""
        return self.reads_until - len(self.cached_tokens)

    @property
    def seconds_per_token(self) -> float:
        """The target's verify time for each generated token so far; 0 before the first token."""
        return self.verify_seconds / self.state.num_generated if self.state.num_generated else 0.0

    def receive(self, message: Message) -> None:
        """Take a proposal, or another message of the drafter's."""
        match message:
            case Proposal():
                if not self.state.propose(message):
                    self.shared.counts.stale_proposals += 1
            case Ready():
                self.is_drafter_ready, self.decodes_alone = True, False
            case Rest():
                self.state.rest(message)
            case Withdraw():
                self.state.withdraw(message)
            case _:
                raise ProtocolError(f"the target cannot handle {message!r}")

    def drop_proposal(self) -> Overdue | None:
        """Drop the outstanding proposal, because a pass with its tokens has failed.

        The target decodes alone for some rounds: twice as many each time, since a failure may cost a text its cache.

        Returns: the message for the drafter; None if the drafter has left.
        """
        overdue = Overdue(self.id, self.state.round + self.rounds_undrafted)
        self.rounds_undrafted *= 2
        if self.state.rest(overdue):
            return overdue
        self.state.outstanding = None
        return None

    def with_stop(self, verdict: Verdict) -> Verdict:
        """The verdict, with the place where a stop string ends the text.

        The verdict carries it so that the drafter learns of it at once, as it does of a stop token.
        """
        if self.shared.find_stop is None:
            return verdict
        return attrs.evolve(verdict, stop=self.shared.find_stop(self.state.preview(verdict)))
