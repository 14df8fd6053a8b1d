"""The target's jobs on its own thread: verify a proposal, or decode a token without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import attrs
import mlx.core as mx
import outcome

from actors.model import CachedSequence, Feed, Model, RewindMode
from actors.sampling.logit_check import LogitCheck
from actors.sampling.logits_pipeline import LogitsPipeline, TokenHistory
from actors.session import Session
from protocol.acceptance import (
    Judgement,
    LazyJudgement,
    choices,
    distribution,
    draw,
    judge_by_match,
    judge_by_rejection,
    likelihoods,
)
from protocol.cached_tokens import FeedPlan
from protocol.messages import Likelihood, Open, Proposal
from protocol.randomness import Purpose, key_for

S = TypeVar("S")
T = TypeVar("T")


@attrs.frozen
class Verified:
    """The outcome of one text's part in a verify pass.

    Attributes:
        judgement: how many drafted tokens are accepted, and the token after them.
        width: tokens that went through the model.
        length: tokens that are cached afterwards.
        single_step: whether only committed tokens were fed.
        num_judged: drafted tokens that were judged.
        likelihoods: of the accepted tokens and the one after them, if the session asks for them.
    """

    judgement: Judgement
    width: int
    length: int
    single_step: bool
    num_judged: int
    likelihoods: tuple[Likelihood, ...] = ()


class CacheLostError(Exception):
    """A text's cache does not hold what the round was planned with."""


@attrs.frozen
class VerifyRequest:
    """One text's part in a verify pass: the missing committed tokens, and a proposal.

    Attributes:
        sequence: the text.
        plan: how to bring its cache in line with the committed text.
        proposal: the drafted tokens; none for a round that the target decodes by itself.
        shared: the session.
        history: of the text, for the rows of the proposal.
        settle: whether only the committed tokens are fed, because replay has become so expensive that it is cheaper to
            feed them for good.
    """

    sequence: CachedSequence
    plan: FeedPlan
    proposal: Proposal
    shared: Session
    history: TokenHistory
    settle: bool

    def prepare(self) -> _Fed:
        """Decide what is fed.

        If the feed could not be undone (`RewindMode.SINGLE`), the drafted tokens are not fed: the pass predicts one
        token, and the first drafted token is compared with it. So it is with `settle`.

        Raises: CacheLostError: a pass that the text shared has failed since the round was planned.
        """
        if self.sequence.length != self.plan.keep:
            raise CacheLostError
        drafted = self.proposal.tokens
        width = len(self.plan.feed) + len(drafted)
        single_step = bool(drafted) and (
            self.settle or self.sequence.prepare(width, self.proposal.start) is RewindMode.SINGLE
        )
        if single_step:
            return _Fed(self, Feed(self.sequence, self.plan.feed, 1), drafted[:1], single_step=True)
        return _Fed(self, Feed(self.sequence, self.plan.feed + drafted, 1 + len(drafted)), drafted, single_step=False)


def verify(model: Model, requests: Sequence[VerifyRequest]) -> list[outcome.Outcome[Verified]]:
    """Feed several texts in one forward pass, judge each proposal, and rewind the caches.

    If no token can be chosen from some row of logits, the tokens accepted before that row stand, as they would without
    a drafter.

    Returns: for each request, in order, its result or the error that concerns it alone. `NotANumberError` and
        `ProcessorError`: no token can be chosen from its first row.
    Raises: whatever the model raises: the pass has failed for all, and their caches are empty.
    """
    prepared = [outcome.capture(request.prepare) for request in requests]
    fed = [each.value for each in prepared if isinstance(each, outcome.Value)]
    try:
        rows = iter(model.feed_together([each.feed for each in fed])) if fed else iter(())
        judged = [_chain(each, lambda fed: fed.judge(next(rows))) for each in prepared]
        mx.eval([each.value.arrays() for each in judged if isinstance(each, outcome.Value)])
    except BaseException:
        # What is in the caches now is not known.
        model.abandon_shared()
        for request in requests:
            request.sequence.forget()
        raise
    return [_chain(each, _Judged.finish) for each in judged]


def _chain(before: outcome.Outcome[S], call: Callable[[S], T]) -> outcome.Outcome[T]:
    """The outcome of a call with the value from before, or the error from before."""
    return outcome.capture(call, before.value) if isinstance(before, outcome.Value) else cast(outcome.Error, before)


@attrs.frozen
class _Fed:
    """A request whose tokens are fed.

    Attributes:
        drafted: the drafted tokens that are judged.
    """

    request: VerifyRequest
    feed: Feed
    drafted: tuple[int, ...]
    single_step: bool

    def judge(self, logits: mx.array) -> _Judged:
        """Apply the session's acceptance rule to its logits; lazy, but that user code is called."""
        proposal, logits_pipeline = self.request.proposal, self.request.shared.logits_pipeline
        processed = logits_pipeline.process(logits, self.request.history, proposal.start)
        filtered = logits_pipeline.filter(processed, proposal.start)
        judgement = judge(filtered, self.drafted, proposal, self.request.shared)
        return _Judged(self, processed, LogitCheck.of(logits, processed), judgement)


@attrs.frozen
class _Judged:
    """A request whose judgement is computed."""

    fed: _Fed
    processed: mx.array
    logit_check: LogitCheck
    judgement: LazyJudgement

    def arrays(self) -> list[mx.array]:
        """What `finish` reads."""
        return [*self.judgement.arrays, *self.logit_check.arrays()]

    def finish(self) -> Verified:
        """Read the judgement, and rewind the cache."""
        request, judgement = self.fed.request, self.judgement.read()
        start = request.proposal.start
        num_fed = 0 if self.fed.single_step else judgement.num_accepted
        num_sound = self.logit_check.num_sound()
        if judgement.num_accepted + (judgement.token is not None) > num_sound:
            if num_sound == 0:
                self.logit_check.check(0, start, "target")
            # The next round needs the logits of the unsound row, and so feeds the token before it again.
            judgement, num_fed = Judgement(num_sound, None), num_sound - 1
        tokens = self.fed.drafted[: judgement.num_accepted] + (() if judgement.token is None else (judgement.token,))
        token_likelihoods = requested_likelihoods(self.processed, tokens, request.shared.opened)
        length = request.sequence.rewind(start + num_fed)
        request.sequence.check(length)
        return Verified(
            judgement,
            len(self.fed.feed.tokens),
            length,
            self.fed.single_step,
            len(self.fed.drafted),
            token_likelihoods,
        )


def requested_likelihoods(logits: mx.array, tokens: tuple[int, ...], opened: Open) -> tuple[Likelihood, ...]:
    """The likelihoods of tokens, if the session asks for them; otherwise none."""
    num_top = opened.settings.logprobs
    return likelihoods(logits, tokens, num_top) if num_top else ()


def judge(
    logits: mx.array,
    drafted: tuple[int, ...],
    proposal: Proposal,
    shared: Session,
) -> LazyJudgement:
    """Apply the session's acceptance rule to the proposal's first `len(drafted)` tokens."""
    opened, settings = shared.opened, shared.opened.settings
    if settings.rule == "match":
        return judge_by_match(
            logits,
            drafted,
            temperature=settings.temperature,
            seed=opened.seed,
            start=proposal.start,
            chosen=shared.logits_pipeline.sample(logits),
        )
    return judge_by_rejection(
        logits,
        drafted,
        proposal.probs[: len(drafted)],
        temperature=settings.temperature,
        seed=opened.seed,
        start=proposal.start,
    )


@attrs.frozen
class _PendingToken:
    """A token that is being computed.

    Attributes:
        token: (1,) id.
        logits: (1, V) processed logits that the token is chosen from.
        logit_check: of that row.
    """

    token: mx.array
    logits: mx.array
    logit_check: LogitCheck

    def launch(self) -> None:
        mx.async_eval(self.token, *self.logit_check.arrays())


class PlainDecoder:
    """Decoding without a drafter, one forward pass ahead of the token that is read.

    The next pass is launched before the token that it starts from is read back. So building its graph and the way
    through trio cost nothing while the device computes. A user's processor or sampler is called with evaluated arrays;
    with one, only the pass is launched ahead, and its token is chosen in the next step.
    """

    def __init__(self, sequence: CachedSequence, opened: Open, logits_pipeline: LogitsPipeline) -> None:
        self._sequence = sequence
        self._opened = opened
        self._logits_pipeline = logits_pipeline
        # Of the pass that was launched ahead: the next token, not read; or the model's logits (1, V) alone.
        self._pending: _PendingToken | None = None
        self._pending_rows: mx.array | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the cache already processes the last token that was returned."""
        return self._pending is not None or self._pending_rows is not None

    def step(
        self, plan: FeedPlan, history: TokenHistory, position: int, go_ahead: bool
    ) -> tuple[int, tuple[Likelihood, ...]]:
        """The token at a position, and its likelihood if the session asks for it.

        Args:
            plan: how to bring the cache in line with the text; empty while the decoder is ahead.
            history: of the text before the token.
            position: absolute, of the token wanted.
            go_ahead: whether a token after it will be wanted.

        Raises:
            NotANumberError, ProcessorError: no token can be chosen.
            CacheLostError: a pass that the text shared has failed since the round was planned.
        """
        if self._sequence.length != plan.keep:
            self._pending = self._pending_rows = None
            raise CacheLostError
        current, self._pending = self._pending, None
        if current is None:
            rows, self._pending_rows = self._pending_rows, None
            if rows is None:
                rows = self._sequence.feed(plan.feed, 1)
                assert rows is not None
            current = self._choose(rows, self._logits_pipeline.process(rows, history, position), position)
        current.launch()
        if go_ahead:
            rows = self._sequence.feed_lazy(current.token)
            if self._logits_pipeline.runs_user_code:
                self._pending_rows = rows
                mx.async_eval(rows)
            else:
                processed = self._logits_pipeline.process_lazily(rows, history, position, current.token)
                self._pending = self._choose(rows, processed, position + 1)
                self._pending.launch()
        self._sequence.check(plan.keep + len(plan.feed) + (1 if go_ahead else 0))
        token = cast(int, current.token.item())
        current.logit_check.check(0, position, "target")
        return token, requested_likelihoods(current.logits, (token,), self._opened)

    def _choose(self, rows: mx.array, logits: mx.array, position: int) -> _PendingToken:
        """The token chosen from processed logits (1, V), lazy; `rows` are the model's own logits."""
        settings, seed = self._opened.settings, self._opened.seed
        filtered = self._logits_pipeline.filter(logits, position)
        if (sampled := self._logits_pipeline.sample(filtered)) is not None:
            token = sampled
        elif settings.rule == "match":
            token = choices(filtered, settings.temperature, seed, position, logits.shape[1])
        else:
            probs = distribution(filtered[0], settings.temperature)
            token = draw(probs, key_for(seed, Purpose.RECOVER, position))[None]
        return _PendingToken(token, logits, LogitCheck.of(rows, logits))
