"""One text's part in a pass of the target: what it feeds, what the pass found, and the verdict that follows."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from actors.model import CachedSequence, CacheLostError, Feed, RewindMode
from actors.sampling.logits_pipeline import TokenHistory
from actors.target.target_session import TargetSession
from protocol.acceptance import ProposedRows
from protocol.cached_tokens import FeedPlan
from protocol.messages import Features, Likelihood, Proposal, Verdict
from protocol.pass_plan import ReadyRound
from protocol.prices import Prices
from protocol.session_state import SessionPhase


@attrs.define(eq=False)
class Part:
    """One text's part in a pass: the missing committed tokens, and a proposal.

    Attributes:
        session: the session of the text.
        sequence: the text in the cache.
        plan: how to bring its cache in line with the committed text.
        proposal: the drafted tokens; none for a round that the target decodes by itself.
        ready: the part as the planning of a pass sees it.
        since_s: when it became ready, in seconds on the worker's clock.
        history: of the text, for the rows of the proposal.
        settle: whether only the committed tokens are fed, because replay has become so expensive that it is cheaper to
            feed them for good.
        alone: whether it must have a pass to itself.

    Set by the pass, on the model's thread:
        feed: what is fed; None before `prepare`.
        drafted: the drafted tokens that are judged.
        single_step: whether only committed tokens were fed.
        error: an error that concerns this text alone; then the rest is not set.
        num_accepted, token: the judgement; see `Judgement`.
        length: number of cached tokens afterwards.
        likelihoods: of the accepted tokens and the one after them, if the session asks for them.
        features: of the tokens that were fed and accepted, if they are recorded.
    """

    session: TargetSession
    sequence: CachedSequence
    plan: FeedPlan
    proposal: Proposal
    ready: ReadyRound
    since_s: float
    history: TokenHistory
    settle: bool = False
    alone: bool = False
    feed: Feed | None = None
    drafted: tuple[int, ...] = ()
    single_step: bool = False
    error: Exception | None = None
    num_accepted: int = 0
    token: int | None = None
    length: int = 0
    likelihoods: tuple[Likelihood, ...] = ()
    features: Features | None = None

    def cut(self, num_drafted: int) -> None:
        """Feed no more than `num_drafted` drafted tokens, if the rest may be left out."""
        if self.ready.reach:
            self.proposal = self.proposal.cut(num_drafted)

    @property
    def feeds_drafted(self) -> bool:
        """Whether drafted tokens are fed, provided that the cache can drop them again."""
        return bool(self.proposal.tokens) and not self.settle

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it feeds; before `prepare`, the number that is planned."""
        if self.feed is not None:
            return len(self.feed.tokens)
        return self.ready.num_needed + (len(self.proposal.tokens) if self.ready.reach else 0)

    def prepare(self) -> Feed:
        """Decide what is fed; on the model's thread.

        If the feed could not be undone (`RewindMode.SINGLE`), the drafted tokens are not fed: the pass predicts one
        token, and the first drafted token is compared with it. The same holds with `settle`.

        Raises: CacheLostError: a pass that the text shared has failed since the part was planned.
        """
        if self.sequence.length != self.plan.keep:
            raise CacheLostError
        drafted = self.proposal.tokens
        width = len(self.plan.feed) + len(drafted)
        self.single_step = bool(drafted) and (
            not self.feeds_drafted or self.sequence.prepare(width, self.proposal.start) is RewindMode.SINGLE
        )
        if self.single_step:
            self.drafted, self.feed = drafted[:1], Feed(self.sequence, self.plan.feed, 1, self.alone)
        else:
            self.drafted = drafted
            self.feed = Feed(self.sequence, self.plan.feed + drafted, 1 + len(drafted), self.alone)
        return self.feed

    @property
    def proposed_rows(self) -> ProposedRows:
        """What is to be judged; only after `prepare`."""
        assert self.feed is not None
        drafted, proposal = self.drafted, self.proposal
        seed = self.session.shared.opened.seed
        return ProposedRows(seed, proposal.start, self.feed.num_logits, drafted, proposal.probs[: len(drafted)])


def next_part(session: TargetSession, prices: Prices, since_s: float) -> Part:
    """The next part of a text, with the proposal of its drafter if there is one."""
    sequence, state = session.sequence, session.state
    assert sequence is not None
    proposal = state.outstanding or Proposal(session.id, state.round, state.next_position, ())
    history = session.shared.logits_pipeline.history(
        state.committed, proposal.tokens, num_rows=1 + len(proposal.tokens)
    )
    plan = session.cached_tokens.plan(state.committed)
    settle = session.replay.should_settle(len(plan.feed) - 1, prices.verify, session.seconds_per_token)
    # A cache that could not have undone the last pass most likely cannot undo this one.
    feeds_drafts = not settle and not session.was_single_step
    num_needed = len(plan.feed) + (len(proposal.tokens) if feeds_drafts and not proposal.reach else 0)
    ready = ReadyRound(num_needed, proposal.reach if feeds_drafts else (), is_row=session.is_row)
    return Part(session, sequence, plan, proposal, ready, since_s, history, settle, alone=session.goes_alone)


def verdict_of(part: Part, note: Callable[..., None]) -> Verdict:
    """The verdict of a part whose pass is over. Records what the cache holds.

    Args:
        note: see `Actor._note`; called if the cache was rewound.
    """
    session, plan = part.session, part.plan
    proposal = part.proposal
    session.was_single_step = part.single_step and not part.settle
    num_drafted_fed = part.num_tokens - len(plan.feed)
    session.cached_tokens.follow(FeedPlan(plan.keep, plan.feed + proposal.tokens[:num_drafted_fed]))
    wanted_length = proposal.start + (0 if part.single_step else part.num_accepted)
    if len(session.cached_tokens) > part.length:
        note(session, "rewind", num_tokens=len(session.cached_tokens) - part.length)
        session.shared.counts.replayed_tokens += wanted_length - part.length
        session.cached_tokens.rewind(part.length)
    return Verdict(
        session.id,
        proposal.round,
        proposal.start,
        part.num_accepted,
        part.token,
        part.single_step,
        settles=part.single_step and part.settle,
        likelihoods=part.likelihoods,
        num_judged=len(part.drafted),
        features=part.features,
    )


# --- texts without drafts -------------------------------------------------------------------------


def is_plain(session: TargetSession) -> bool:
    """Whether the next round of a text is one token of the target's own."""
    state = session.state
    return (
        state.phase in (SessionPhase.UNDRAFTED, SessionPhase.RESTING)
        and state.outstanding is None
        and not session.goes_alone
        and not has_lost_tokens(session)
    )


def num_plain_rounds(session: TargetSession) -> float:
    """How many rounds in a row are certain to be plain, for a text whose next round is plain. Only the end of the text
    can come before.
    """
    state = session.state
    in_rest = state.rests_until - state.round if state.phase is SessionPhase.RESTING else math.inf
    return min(in_rest, math.inf if state.remaining is None else state.remaining)


def has_lost_tokens(session: TargetSession) -> bool:
    """Whether tokens of a text must be read again, since a pass that it shared has failed. Updates its session."""
    session.notice_loss()
    session.reads_again = session.reads_again and len(session.cached_tokens) < len(session.state.committed) - 1
    return session.reads_again
