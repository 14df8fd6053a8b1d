"""The target's state of one session."""

from __future__ import annotations

import attrs

from actors.actor import ActorSession
from actors.session import Session
from actors.target.pass_queue import SharedPass
from actors.target.plain_decoder import PlainDecoder
from actors.workers.shared_jobs import Suspects
from protocol.backoff import Backoff
from protocol.errors import ProtocolError
from protocol.messages import Message, Proposal, Ready, Rest, Verdict, Withdraw
from protocol.replay import ReplayDebt


class TargetSession(ActorSession):
    """The state of one session at the target.

    Attributes:
        decoder: of rounds without a proposal; made for the first of them.
        replay: tracks when replayed tokens are fed for good.
        verify_seconds: spent on verify passes so far.
        last_pass: the last pass, if others could share it.
        last_pass_s: seconds of the last pass, over the sessions that shared it.
        was_plain: whether the round before had no proposal.
        was_single_step: whether the last verify pass could not have been undone.
        suspects: of a shared pass with drafted tokens that has failed. Then drafted tokens of this session go alone,
            until they succeed; None if there is no such pass.
        drafts: leaves out drafted tokens where passes with them have failed.
        awaits_proposal: whether its task waits for a proposal now.
        is_drafter_ready: whether the drafter has read the text, so that its proposals can be waited for.
        decodes_alone: whether the target goes on without the drafter until the drafter is ready.
    """

    def __init__(self, shared: Session) -> None:
        super().__init__(shared)
        self.decoder: PlainDecoder | None = None
        self.replay = ReplayDebt()
        self.verify_seconds = 0.0
        self.last_pass: SharedPass | None = None
        self.last_pass_s = 0.0
        self.was_plain = False
        self.was_single_step = False
        self.suspects: Suspects | None = None
        self.drafts = Backoff()
        self.awaits_proposal = False
        self.is_drafter_ready = False
        self.decodes_alone = False

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
        self.wake()

    def with_stop(self, verdict: Verdict) -> Verdict:
        """The verdict, with the place where a stop string ends the text.

        The verdict carries it so that the drafter learns of it at once, as it does of a stop token.
        """
        if self.shared.find_stop is None:
            return verdict
        return attrs.evolve(verdict, stop=self.shared.find_stop(self.state.preview(verdict)))
