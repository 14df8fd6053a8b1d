"""The target's state of one session."""

from __future__ import annotations

import math

import attrs

from actors.actor import ActorSession
from actors.session import Session
from actors.target.passes import Row, RowResult
from actors.workers.worker import Worker
from protocol.cached_tokens import ReplayDebt
from protocol.deadlines import ROUNDS_ALONE
from protocol.messages import Overdue, Verdict
from protocol.pass_plan import Expected, ReadyRound
from protocol.prices import Mean, Prices
from protocol.session_state import SessionPhase


class TargetSession(ActorSession):
    """The state of one session at the target."""

    def __init__(self, shared: Session) -> None:
        super().__init__(shared)
        self.row: Row | None = None  # its row in passes; None before the first, and after its cache was lost
        self.replay = ReplayDebt()  # decides when replayed tokens are settled
        self.verify_seconds = 0.0  # spent on verify passes so far
        self.reads_until = 0  # length of the part of the prompt that is to be read
        self.reads_alone = False  # whether no other prompt may be read in its passes
        self.failure: Exception | None = None  # the error that ended the session, if one did
        self.is_blocked = False  # whether a slow consumer keeps the next round from beginning
        # When the wait for a proposal began, in seconds on the worker's clock; None in no wait.
        self.awaits_proposal_since_s: float | None = None
        self.proposal_due_s = 0.0  # when that wait ends
        self.was_asked = False  # whether the drafter was asked for what it has drafted by now, because it was late
        self.was_hurried = False  # whether it was asked because other texts wait
        self.is_drafter_ready = False  # whether the drafter has read the text, so that its proposals can be waited for
        self.decodes_alone = False  # whether the target goes on without the drafter until the drafter is ready
        self.unreported: tuple[int, ...] = ()  # tokens that were committed in a rest, and not sent to the drafter yet
        self.round_began_s = self.busy_before_s = 0.0  # when the round began, and the worker's busy seconds by then
        self.ended_s: float | None = None  # when the last pass over proposals ended; None once the next round is ready
        self.last_ready = ReadyRound(1)  # the round that took part in it
        self.turnaround_s = Mean(memory=8.0)  # mean time from the end of a pass until the next round is ready
        self.has_shared = False  # whether the text has shared a pass
        self.was_plain = False  # whether the round before had no proposal
        self.was_single_step = False  # whether the last verify pass could not have been undone
        self.goes_alone = False  # whether the next pass of the text is its own, because one that it shared has failed
        self.rounds_undrafted = ROUNDS_ALONE  # rounds without drafted tokens after the next pass with some that fails
        self.reads_again = False  # whether the cache has lost committed tokens because a pass has failed

    def notice_loss(self) -> bool:
        if not super().notice_loss():
            return False
        self.reads_again = True
        self.row = None  # it may be ahead, in the cache that was lost
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

    def is_plain(self) -> bool:
        """Whether the next round is one token of the target's own, in a pass that may be launched ahead."""
        return (
            self.state.phase in (SessionPhase.UNDRAFTED, SessionPhase.RESTING)
            and self.state.outstanding is None
            and not self.goes_alone
            and not self.has_lost_tokens()
        )

    @property
    def num_plain_rounds(self) -> float:
        """How many rounds in a row are certain to be plain, if the next one is, unless the text ends before."""
        state = self.state
        in_rest = state.rests_until - state.round if state.phase is SessionPhase.RESTING else math.inf
        remaining = math.inf if state.remaining is None else state.remaining
        # What is forced when the reasoning ends is decided between two passes.
        reasoning = math.inf if self._num_reasoning_left is None else max(1, self._num_reasoning_left)
        return min(in_rest, remaining, reasoning)

    @property
    def _num_reasoning_left(self) -> int | None:
        """Tokens that may follow before the end of the reasoning is forced, or forced again; None for any number."""
        limit = self.shared.reasoning_limit
        if limit is None or self._num_closing == 0:
            return None if limit is None else limit.num_left
        return self._num_closing + 1  # the one after the tag may open the reasoning again

    @property
    def _num_closing(self) -> int:
        """Tokens that are forced next, to close the reasoning."""
        return max(0, self.shared.logits_pipeline.forced_until - self.state.next_position)

    def _close_reasoning(self) -> None:
        """Force the tokens that close the reasoning, if it is due; otherwise plan no pass that goes beyond its end."""
        limit, pipeline, position = self.shared.reasoning_limit, self.shared.logits_pipeline, self.state.next_position
        if limit is None:
            return
        assert self.row is not None
        limit.follow(self.state.committed)
        if self._num_closing == 0:
            # The next token of a row that is ahead may be chosen already.
            is_due = limit.num_left == 0 and not self.row.is_ahead
            pipeline.force(position, limit.closing(self.state.committed) if is_due else ())
        if (proposal := self.row.proposal) is not None:
            drawn = (index for index, probs in enumerate(proposal.probs) if probs is not None)
            num_certain = next(drawn, len(proposal.tokens))
            num_judged = limit.num_to_judge(proposal.tokens, num_certain, self._num_closing)
            self.row.proposal = proposal.cut(num_judged)

    @property
    def is_ahead(self) -> bool:
        """Whether a pass for the next token was launched already."""
        return self.row is not None and self.row.is_ahead

    def has_lost_tokens(self) -> bool:
        """Whether committed tokens must be read again, since a pass that the sequence shared has failed."""
        self.notice_loss()
        self.reads_again = self.reads_again and len(self.cached_tokens) < len(self.state.committed) - 1
        return self.reads_again

    def begin_round(self, worker: Worker) -> None:
        """Note when the next round begins."""
        self.round_began_s, self.busy_before_s = worker.clock(), worker.busy_seconds

    def expected(self, *, can_hurry: bool) -> Expected:
        """What is known of the next round, which cannot begin yet."""
        awaits_drafter = self.awaits_proposal_since_s is not None
        return Expected(
            awaits_drafter,
            self.is_drafter_ready,
            self.settings.lookahead,
            None if self.ended_s is None else self.last_ready,
            0.0 if self.ended_s is None else self.ended_s + self.turnaround_s.value,
            can_hurry=awaits_drafter and can_hurry,
            was_hurried=self.was_hurried,
            is_row=self.is_row,
        )

    def plan_pass(self, prices: Prices) -> ReadyRound:
        """Prepare the row for its next pass, with the drafter's proposal if there is one; once, unless it is plain."""
        assert self.sequence is not None
        if self.row is None or self.row.sequence is not self.sequence:
            self.row = Row(self.sequence, self.opened, self.shared.logits_pipeline)
        row, committed, proposal = self.row, self.state.committed, self.state.outstanding
        row.plan = self.cached_tokens.plan(committed, num_logits=0 if row.is_ahead else 1)
        row.proposal, row.alone = proposal, self.goes_alone
        if (features := self.sequence.features) is not None:
            features.want(self.state.phase is not SessionPhase.UNDRAFTED)
        self._close_reasoning()
        row.history = row.logits_pipeline.history(committed, row.proposed, num_rows=1 + len(row.proposed))
        num_pending = max(0, len(row.plan.feed) - 1)
        row.settle = self.replay.should_settle(num_pending, prices.verify, self.seconds_per_token)
        num_planned = self.num_planned
        has_drafted = row.proposal is not None and num_planned > max(1, len(row.plan.feed))
        reach = row.proposal.reach if row.proposal is not None and has_drafted else ()
        return ReadyRound(num_planned - len(reach), reach, is_row=self.is_row)

    @property
    def num_planned(self) -> int:
        """Number of tokens that the next pass is to feed. A cache that could not have undone the last pass over drafted
        tokens most likely cannot undo this one.
        """
        assert self.row is not None
        feeds_drafted = self.row.feeds_drafted and not self.was_single_step
        return max(1, len(self.row.plan.feed)) + (len(self.row.proposed) if feeds_drafted else 0)

    def follow(self, result: RowResult) -> int:
        """Record what the cache holds after a pass. Returns: how many tokens were dropped again."""
        if result.error is not None:
            return 0
        assert self.row is not None
        if self.row.drafted:
            self.was_single_step = result.single_step and not self.row.settle
        self.cached_tokens.follow(result.fed)
        num_dropped = len(self.cached_tokens) - result.length
        if num_dropped > 0:
            wanted = self.row.position + (0 if result.single_step else result.num_accepted)
            self.shared.counts.replayed_tokens += wanted - result.length
            self.cached_tokens.rewind(result.length)
        return num_dropped

    def verdict(self, result: RowResult) -> Verdict:
        """The verdict of the pass that has judged the round, with the place where a stop string ends the text."""
        assert self.row is not None
        verdict = Verdict(
            self.id,
            self.state.round,
            self.state.next_position,
            result.num_accepted,
            result.token,
            result.single_step,
            settles=result.single_step and self.row.settle,
            likelihoods=result.likelihoods,
            num_judged=result.num_judged,
            features=result.features,
        )
        if self.shared.find_stop is None:
            return verdict
        return attrs.evolve(verdict, stop=self.shared.find_stop(self.state.preview(verdict)))

    def drop_proposal(self) -> Overdue | None:
        """Drop the outstanding proposal, because a pass with its tokens has failed, and decode alone for some rounds:
        twice as many each time, since a failure may cost a text its cache. None, and no message, if the drafter has
        left.
        """
        overdue = Overdue(self.id, self.state.round + self.rounds_undrafted)
        self.rounds_undrafted *= 2
        if self.state.rest(overdue):
            return overdue
        self.state.outstanding = None
        return None
