"""Verify passes, on the target's own thread: feed several texts at once, judge each proposal, and rewind the caches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TypeVar, cast

import attrs
import mlx.core as mx
import outcome

from actors.model import CachedSequence, CacheLostError, Feed, Model, RewindMode
from actors.sampling.logit_check import LogitCheck, SharedValues
from actors.sampling.logits_pipeline import TokenHistory
from actors.session import Session
from protocol.acceptance import (
    Judgement,
    LazyJudgement,
    choices_together,
    count_matches,
    judge_by_match,
    judge_by_rejection,
    likelihoods,
)
from protocol.cached_tokens import FeedPlan
from protocol.errors import ProcessorError
from protocol.messages import Features, Likelihood, Open, Proposal

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
        features: of the tokens that were fed and accepted, if they are recorded.
    """

    judgement: Judgement
    width: int
    length: int
    single_step: bool
    num_judged: int
    likelihoods: tuple[Likelihood, ...] = ()
    features: Features | None = None


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
        one_by_one: whether no drafted tokens are fed, and the round goes on with the rest of the proposal if the first
            one is accepted.
        alone: whether it has a pass for itself.
    """

    sequence: CachedSequence
    plan: FeedPlan
    proposal: Proposal
    shared: Session
    history: TokenHistory
    settle: bool
    one_by_one: bool = False
    alone: bool = False

    @property
    def feeds_drafted(self) -> bool:
        """Whether drafted tokens are fed, if the cache can drop them again."""
        return bool(self.proposal.tokens) and not self.settle and not self.one_by_one

    def prepare(self) -> _Fed:
        """Decide what is fed.

        If the feed could not be undone (`RewindMode.SINGLE`), the drafted tokens are not fed: the pass predicts one
        token, and the first drafted token is compared with it. So it is with `settle` and `one_by_one`.

        Raises: CacheLostError: a pass that the text shared has failed since the round was planned.
        """
        if self.sequence.length != self.plan.keep:
            raise CacheLostError
        drafted = self.proposal.tokens
        width = len(self.plan.feed) + len(drafted)
        single_step = bool(drafted) and (
            not self.feeds_drafted or self.sequence.prepare(width, self.proposal.start) is RewindMode.SINGLE
        )
        if single_step:
            return _Fed(self, Feed(self.sequence, self.plan.feed, 1, self.alone), drafted[:1], single_step=True)
        feed = Feed(self.sequence, self.plan.feed + drafted, 1 + len(drafted), self.alone)
        return _Fed(self, feed, drafted, single_step=False)


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
        logits = model.feed_together([each.feed for each in fed]) if fed else []
        if any(each.request.shared.logits_pipeline.runs_user_code for each in fed):
            # User code is called with evaluated arrays, and must not be blamed for a pass that fails.
            mx.eval(logits)
        found = iter(judge_each(fed, logits))
        judged = [next(found) if isinstance(each, outcome.Value) else each for each in prepared]
        sound = [each.value for each in judged if isinstance(each, outcome.Value)]
        arrays = {id(array): array for each in sound for array in each.arrays()}  # texts share some
        mx.eval(*arrays.values())
    except BaseException:
        # What is in the caches now is not known.
        model.abandon_shared()
        for request in requests:
            request.sequence.forget()
        raise
    return [_chain(each, _Judged.finish) for each in judged]


def judge_each(fed: Sequence[_Fed], logits: Sequence[mx.array]) -> list[outcome.Outcome[_Judged]]:
    """Apply the sessions' acceptance rules to their logits: one set of array operations for texts of one kind.

    Args:
        fed: the texts.
        logits: (n, V) of each.
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, each in enumerate(fed):
        kinds.setdefault(each.kind or index, []).append(index)
    judged: dict[int, outcome.Outcome[_Judged]] = {}
    for indices in kinds.values():
        if len(indices) == 1:
            judged[indices[0]] = outcome.capture(fed[indices[0]].judge, logits[indices[0]])
            continue
        together = _judge_together([fed[index] for index in indices], [logits[index] for index in indices])
        judged.update(zip(indices, map(outcome.Value, together), strict=True))
    return [judged[index] for index in range(len(fed))]


def _judge_together(fed: Sequence[_Fed], logits: Sequence[mx.array]) -> list[_Judged]:
    """Judge texts of one kind. No user code runs, so that a failure is one of the pass."""
    rows = mx.concatenate(list(logits))
    ends = list(accumulate(each.shape[0] for each in logits))
    parts = [slice(end - each.shape[0], end) for each, end in zip(logits, ends, strict=True)]
    decisions = [
        (each.request.shared.opened.seed, each.request.proposal.start + i)
        for each, part in zip(fed, parts, strict=True)
        for i in range(part.stop - part.start)
    ]
    settings = fed[0].request.shared.opened.settings
    filtered = fed[0].request.shared.logits_pipeline.filter(rows, 0)
    chosen = SharedValues(choices_together(filtered, settings.rule, settings.temperature, decisions))
    largest = SharedValues(mx.max(rows, axis=-1))
    return [
        _Judged(each, rows, LogitCheck(largest, rows=part), judge_choices(chosen, part, each.drafted))
        for each, part in zip(fed, parts, strict=True)
    ]


def judge_choices(chosen: SharedValues, part: slice, drafted: tuple[int, ...]) -> LazyJudgement:
    """Judge a proposal by the target's choices, which are part of an array."""

    def read() -> Judgement:
        ids = chosen.part(part)
        num_accepted = count_matches(ids, drafted)
        return Judgement(num_accepted, ids[num_accepted] if num_accepted < len(ids) else None)

    return LazyJudgement((chosen.array,), read)


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

    @property
    def kind(self) -> Hashable | None:
        """What texts must have in common to be judged together; None for one that is judged by itself."""
        opened = self.request.shared.opened
        if opened.settings.logprobs or (opened.settings.rule == "rejection" and self.drafted):
            return None
        return self.request.shared.logits_pipeline.kind

    def judge(self, logits: mx.array) -> _Judged:
        """Apply the session's acceptance rule to its logits; lazy, but that user code is called.

        User code that fails at a row may fail because of drafted tokens. So rows are left out from the end until it
        does not. The tokens before those rows are judged, so that none is left out for what it is.
        """
        for num_rows in range(logits.shape[0], 1, -1):
            with suppress(ProcessorError):
                return self._judge(logits[:num_rows])
        return self._judge(logits[:1])

    def _judge(self, logits: mx.array) -> _Judged:
        proposal, logits_pipeline = self.request.proposal, self.request.shared.logits_pipeline
        processed = logits_pipeline.process(logits, self.request.history, proposal.start)
        filtered = logits_pipeline.filter(processed, proposal.start)
        judgement = judge(filtered, self.drafted[: logits.shape[0]], proposal, self.request.shared)
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
        return [*self.judgement.arrays, *self.logit_check.arrays(), *self.fed.request.sequence.feature_arrays()]

    def finish(self) -> Verified:
        """Read the judgement, and rewind the cache."""
        request, judgement = self.fed.request, self.judgement.read()
        start = request.proposal.start
        num_sound = self.logit_check.num_sound()
        if judgement.num_accepted + (judgement.token is not None) > num_sound:
            if num_sound == 0:
                self.logit_check.check(0, start, "target")
            judgement = Judgement(num_sound, None)
        # Without a row for the token that comes next, the next round feeds the one before it again.
        num_fed = 0 if self.fed.single_step else judgement.num_accepted - (judgement.token is None)
        tokens = self.fed.drafted[: judgement.num_accepted] + (() if judgement.token is None else (judgement.token,))
        token_likelihoods = requested_likelihoods(self.processed, tokens, request.shared.opened)
        # Before the rewind: one to a checkpoint goes further back, and leaves accepted tokens to the next pass.
        goes_on = request.one_by_one and judgement.token is None and len(request.proposal.tokens) > 1
        features = None if goes_on else request.sequence.take_features(start + num_fed)
        length = request.sequence.rewind(start + num_fed)
        request.sequence.check(length)
        return Verified(
            judgement,
            len(self.fed.feed.tokens),
            length,
            self.fed.single_step,
            min(len(self.fed.drafted), self.processed.shape[0]),
            token_likelihoods,
            features,
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
