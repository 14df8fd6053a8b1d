"""One round of a text at the target: what it feeds, and what becomes of the text once its pass is over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from actors.model import CachedSequence
from actors.sampling.logits_pipeline import TokenHistory
from actors.target.plain_decoder import Decoded, PlainDecoder
from actors.target.target_session import OneByOne, RoundFailure, TargetSession
from actors.target.verify import Verified, VerifyRequest
from protocol.cached_tokens import FeedPlan
from protocol.messages import Proposal, Verdict
from protocol.pass_plan import ReadyRound
from protocol.prices import Prices
from protocol.session_state import SessionPhase


@attrs.define(eq=False)
class Round:
    """A round that can be computed.

    Attributes:
        session: whose round.
        request: its part in a pass.
        ready: what the plan of a pass sees of it.
        since_s: since when it can be computed, in seconds on the worker's clock.
    """

    session: TargetSession
    request: VerifyRequest
    ready: ReadyRound
    since_s: float

    def cut(self, num_drafted: int) -> None:
        """Feed no more than `num_drafted` drafted tokens, if the others may be left out."""
        if self.ready.reach:
            self.request = attrs.evolve(self.request, proposal=self.request.proposal.cut(num_drafted))

    def pass_over(self) -> None:
        """Note that a pass has left it out, so that the next one must not."""
        if not self.ready.was_passed_over:
            self.ready = attrs.evolve(self.ready, was_passed_over=True)

    @property
    def num_tokens(self) -> int:
        """Tokens that it feeds."""
        return self.ready.num_needed + (len(self.request.proposal.tokens) if self.ready.reach else 0)


def next_round(session: TargetSession, prices: Prices, now_s: float) -> Round:
    """The next pass of a text whose drafter has proposed, or does not."""
    sequence, state, failure = session.sequence, session.state, session.round_failure
    assert sequence is not None
    proposal = state.outstanding or Proposal(session.id, state.round, state.next_position, ())
    if failure is None and proposal.tokens and session.drafts.leaves_out():
        failure = session.round_failure = RoundFailure(OneByOne(proposal))
    pipeline = session.shared.logits_pipeline
    history = pipeline.history(state.committed, proposal.tokens, num_rows=1 + len(proposal.tokens))
    goes_alone = failure is not None and failure.goes_alone
    if failure is not None and (one_by_one := failure.one_by_one) is not None:
        plan = session.cached_tokens.plan(state.committed, one_by_one.accepted)
        request = VerifyRequest(
            sequence,
            plan,
            one_by_one.left,
            session.shared,
            history,
            settle=False,
            one_by_one=bool(proposal.tokens),
            alone=goes_alone,
        )
        return Round(session, request, ReadyRound(len(plan.feed)), now_s)
    plan = session.cached_tokens.plan(state.committed)
    settle = session.replay.should_settle(len(plan.feed) - 1, prices.verify, session.seconds_per_token)
    request = VerifyRequest(sequence, plan, proposal, session.shared, history, settle, alone=goes_alone)
    if request.feeds_drafted and session.suspects is not None:
        request = attrs.evolve(request, alone=True)
    # A cache that could not have undone the last pass most likely cannot undo this one.
    feeds_drafts = not settle and not session.was_single_step
    num_needed = len(plan.feed) + (len(proposal.tokens) if feeds_drafts and not proposal.reach else 0)
    return Round(session, request, ReadyRound(num_needed, proposal.reach if feeds_drafts else ()), now_s)


def stays_plain(session: TargetSession) -> bool:
    """Whether there is a round after this one, and it is the target's own as well, whatever this one's token is."""
    state = session.state
    rests_on = state.phase is not SessionPhase.RESTING or state.round + 1 < state.rests_until
    return rests_on and (state.remaining is None or state.remaining > 1)


def verdict_of(round: Round, verified: Verified, on_rewind: Callable[[TargetSession, int], None]) -> Verdict | None:
    """The verdict of a round whose pass is over, or None if another pass follows. Records what the cache holds.

    Args:
        on_rewind: called with the session and the number of tokens, >= 1, that its cache was rewound by.
    """
    session, request, failure = round.session, round.request, round.session.round_failure
    if request.one_by_one and failure is not None and failure.one_by_one is not None:
        session.cached_tokens.follow(request.plan)
        return _verdict_one_by_one(session, failure.one_by_one, verified)
    proposal, judgement, plan = request.proposal, verified.judgement, request.plan
    session.was_single_step = verified.single_step and not request.settle
    num_drafted_fed = verified.width - len(plan.feed)
    session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + proposal.tokens[:num_drafted_fed]))
    wanted_length = proposal.start + (0 if verified.single_step else judgement.num_accepted)
    if len(session.cached_tokens) > verified.length:
        on_rewind(session, len(session.cached_tokens) - verified.length)
        session.shared.counts.replayed_tokens += wanted_length - verified.length
        session.cached_tokens.rewind(verified.length)
    return Verdict(
        session.id,
        proposal.round,
        proposal.start,
        judgement.num_accepted,
        judgement.token,
        verified.single_step,
        settles=verified.single_step and request.settle,
        likelihoods=verified.likelihoods,
        num_judged=verified.num_judged,
        features=verified.features,
    )


def _verdict_one_by_one(session: TargetSession, one_by_one: OneByOne, verified: Verified) -> Verdict | None:
    """The verdict, if the tokens are judged; None if the next one is to be."""
    one_by_one.likelihoods += verified.likelihoods
    one_by_one.features = verified.features
    num_accepted = len(one_by_one.accepted) + verified.judgement.num_accepted
    one_by_one.advance()
    if verified.judgement.token is None and one_by_one.left.tokens:
        return None
    return verdict_so_far(session, one_by_one, num_accepted, verified.judgement.token)


def verdict_so_far(
    session: TargetSession, one_by_one: OneByOne, num_accepted: int, token: int | None = None
) -> Verdict:
    """The verdict of a proposal of which some tokens were judged."""
    proposal = one_by_one.proposal
    return Verdict(
        session.id,
        proposal.round,
        proposal.start,
        num_accepted,
        token,
        likelihoods=one_by_one.likelihoods,
        num_judged=len(proposal.tokens) - len(one_by_one.left.tokens),
        features=one_by_one.features,
    )


# --- texts without drafts ------------------------------------------------------------------------


def is_plain(session: TargetSession) -> bool:
    """Whether the next round of a text is one token of the target's own, and others may be decoded in the same pass."""
    state, sequence = session.state, session.sequence
    assert sequence is not None
    return (
        state.phase in (SessionPhase.UNDRAFTED, SessionPhase.RESTING)
        and state.outstanding is None
        and session.round_failure is None
        and not state.opened.settings.logprobs
        and not sequence.records_features
        and not has_lost_tokens(session, sequence)
    )


# --- a text alone ---------------------------------------------------------------------------------


@attrs.frozen
class PlainStep:
    """A step of the decoder of a text that has no proposal and no other texts beside it.

    Attributes:
        decoder: of the text.
        plan: what it feeds.
        call: makes the step, on the worker's thread.
    """

    decoder: PlainDecoder
    plan: FeedPlan
    call: Callable[[], Decoded]


def plain_step(session: TargetSession, *, is_alone: bool) -> PlainStep:
    """The next step of a text's decoder.

    Args:
        is_alone: whether no other text would share passes with it; otherwise the step starts none ahead.
    """
    sequence, state = session.sequence, session.state
    assert sequence is not None
    if session.decoder is None:
        session.decoder = PlainDecoder(sequence, state.opened, session.shared.logits_pipeline)
    decoder = session.decoder
    plan = session.cached_tokens.plan(state.committed, num_logits=0 if decoder.is_ahead else 1)
    history: TokenHistory = session.shared.logits_pipeline.history(state.committed)
    goes_ahead = is_alone and stays_plain(session)
    return PlainStep(decoder, plan, partial(decoder.step, plan, history, state.next_position, goes_ahead))


def verdict_of_step(session: TargetSession, step: PlainStep, decoded: Decoded) -> Verdict:
    """The verdict of a decoder's step; brings the record of the cache in line."""
    token, likelihoods, features = decoded
    state = session.state
    session.cached_tokens.follow(FeedPlan(step.plan.keep, step.plan.feed + ((token,) if step.decoder.is_ahead else ())))
    return Verdict(session.id, state.round, state.next_position, 0, token, likelihoods=likelihoods, features=features)


def has_lost_tokens(session: TargetSession, sequence: CachedSequence) -> bool:
    """Whether a text must be read again, since a pass that it shared has failed."""
    if sequence.length < len(session.cached_tokens):
        session.reads_again = len(session.state.committed) > 1 or bool(session.accepted)
        session.decoder = None  # it may be ahead in the cache that is lost
        session.cached_tokens.rewind(sequence.length)
    return session.reads_again
