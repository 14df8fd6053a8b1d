"""What the drafter does on its own thread: one draft step after the other, as far as a leash goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import attrs
import mlx.core as mx

from actors.model import CachedSequence, RewindMode
from actors.sampling.logit_check import LogitCheck
from actors.sampling.logits_pipeline import TokenHistory, pad
from actors.session import Session
from actors.workers.worker import Step
from protocol.acceptance import distribution, draw, likeliest, scores
from protocol.cached_tokens import FeedPlan
from protocol.draft_budget import EMPTY_BUDGET, DraftBudget
from protocol.lookahead_tree import Guess
from protocol.messages import Open
from protocol.randomness import Purpose, further, key_for


@attrs.frozen
class Drafted:
    """What may come after a node.

    Attributes:
        guesses: the drafter's choice first.
        can_look_ahead: whether the cache could now take one that is not committed and lose it again.
        fed: what the cache has carried out since it was heard of last; the choice too, where the step after it has
            been launched.
    """

    guesses: tuple[Guess, ...]
    can_look_ahead: bool
    fed: FeedPlan


@attrs.frozen
class RewoundToCheckpoint:
    """The cache could only go back to a checkpoint, and holds `length` tokens, not those `wanted`; nothing was fed."""

    length: int
    wanted: int


@attrs.frozen
class CannotLookAhead:
    """The cache could not lose the text again if it came to that; it holds `length` tokens, and nothing was fed."""

    length: int


StepOutcome = Drafted | RewoundToCheckpoint | CannotLookAhead


@attrs.frozen
class DraftSteps:
    """Draft steps in a row: after one text, then down the drafter's own choices.

    Attributes:
        line: the draft model's cache of this session.
        settled: length of the committed text; the text to draft after may go beyond it.
        shared: of the session.
        vocab_size: the width of the target's logits. Ids beyond it are not drafted: they are rows
            that pad the draft's embedding.
        num_guesses: how many tokens are wanted, >= 1: the drafter's choice, and its likeliest others.
        clock: seconds.
        chains: see `DraftActor`.
    """

    sequence: CachedSequence
    settled: int
    shared: Session
    vocab_size: int
    num_guesses: int
    clock: Callable[[], float]
    chains: bool | None

    def begin(self, plan: FeedPlan, trail: int, history: TokenHistory, draft_budget: DraftBudget) -> Step[StepOutcome]:
        """Draft one token.

        Args:
            plan: how to bring the cache in line with the text that the token comes after.
            trail: of that text.
            history: of that text.
            leash: how far to go on.

        Returns: the tokens, how sure the drafter is of each, and for the choice, under the rejection rule, the
            distribution that it was drawn from; or what stood against it.
        """
        if (length := self.sequence.rewind(plan.keep)) < plan.keep:
            return Step(RewoundToCheckpoint(length, plan.keep))
        position = plan.keep + len(plan.feed)
        if position > self.settled and self.sequence.prepare(len(plan.feed), self.settled) is RewindMode.SINGLE:
            return Step(CannotLookAhead(plan.keep))
        rows = self.sequence.feed(plan.feed, 1)
        assert rows is not None
        return self._read(plan, self._guess(rows, position, trail, history), trail, history, draft_budget)

    def _read(
        self, fed: FeedPlan, lazy: LazyGuesses, trail: int, history: TokenHistory, draft_budget: DraftBudget
    ) -> Step[StepOutcome]:
        """Read guesses back, and say what follows; where that pays, it is launched first."""
        position = fed.keep + len(fed.feed)
        can_look_ahead = True
        launched: LazyGuesses | None = None
        if self._may_chain() and draft_budget.foresees_another(self.clock()):
            can_look_ahead = self._can_look_ahead()
            if can_look_ahead:
                mx.async_eval(*lazy.arrays())
                launched = self._guess(self.sequence.feed_lazy(lazy.choice), position + 1, 0, history)
                mx.async_eval(*launched.arrays())
        found = lazy.read()
        lazy.logit_check.check(0, position, "draft")
        token = found[0].token
        if launched is not None:
            self.sequence.check(position + 1)
            # Whatever comes of the step, the cache holds the choice.
            fed = FeedPlan(fed.keep, (*fed.feed, token))
        else:
            self.sequence.check(position)
            can_look_ahead = can_look_ahead and self._can_look_ahead()
        drafted = Drafted(found, can_look_ahead, fed)
        # Nothing comes after the end of the text.
        if not can_look_ahead or token in self.shared.opened.stop_tokens:
            return Step(drafted)
        left, trail, history = draft_budget.after(found, self.clock()), further(trail, token), history.appended(token)
        if launched is not None:
            # The device is at work on it, wanted or not.
            return Step(
                drafted,
                partial(self._read, FeedPlan(position + 1, ()), launched, trail, history, left or EMPTY_BUDGET),
            )
        if left is not None:
            return Step(drafted, partial(self.begin, FeedPlan(position, (token,)), trail, history, left))
        return Step(drafted)

    def _guess(self, rows: mx.array, position: int, trail: int, history: TokenHistory) -> LazyGuesses:
        logits = self.shared.logits_pipeline.shape(pad(rows, self.vocab_size), history, position)
        # What processors leave is no failure of the drafter's, which may be ahead of any text that will come.
        logit_check = LogitCheck.of(rows, rows)
        chosen = self.shared.logits_pipeline.sample(logits)
        return guesses(
            logits, logit_check, self.shared.opened, position, trail, self.vocab_size, self.num_guesses, chosen
        )

    def _can_look_ahead(self) -> bool:
        return self.sequence.prepare(1, self.settled) is not RewindMode.SINGLE

    def _may_chain(self) -> bool:
        """Whether a step may be launched before the choice that it starts from is known."""
        # Under the rejection rule what is drawn hangs on the text before; so does what some processors make of logits.
        # A user's sampler is called with what is computed.
        logits_pipeline = self.shared.logits_pipeline
        if self.shared.opened.settings.rule != "match" or logits_pipeline.needs_text or logits_pipeline.runs_user_code:
            return False
        return mx.default_device().type == mx.DeviceType.gpu if self.chains is None else self.chains


@attrs.frozen
class LazyGuesses:
    """Guesses that may not be computed yet.

    Attributes:
        choice: (1,) the drafter's choice.
        peaks: of the draft model's own row.
        others: (1, k) further tokens, and (1, k) how sure the drafter is of each.
        expected: () how sure it is of the choice; None where the choice is the first of the others, which it is under
            the match rule, unless a user's sampler made it.
        probs: (V,) the distribution that the choice was drawn from; None under the match rule.
    """

    choice: mx.array
    logit_check: LogitCheck
    others: tuple[mx.array, mx.array]
    expected: mx.array | None = None
    probs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        """All of them."""
        arrays = (self.choice, *self.logit_check.arrays(), *self.others, self.expected, self.probs)
        return [array for array in arrays if array is not None]

    def read(self) -> tuple[Guess, ...]:
        """The guesses, the choice first."""
        mx.eval(*self.arrays())
        if self.expected is None:
            return _ranked(self.others)
        token, confidence = cast(int, self.choice.item()), _share(cast(float, self.expected.item()))
        others = [guess for guess in _ranked(self.others, first=1) if guess.token != token]
        return Guess(token, confidence, self.probs, raw=confidence), *others[: self.others[0].shape[1] - 1]


def guesses(
    logits: mx.array,
    logit_check: LogitCheck,
    opened: Open,
    position: int,
    trail: int,
    vocab_size: int,
    num_guesses: int,
    chosen: mx.array | None = None,
) -> LazyGuesses:
    """What may come at a position.

    Args:
        logits: (1, V) of the draft model, shaped; lazy or not.
        peaks: of its own row.
        opened: of the session.
        position: absolute.
        trail: of the text before; of no account under the match rule.
        vocab_size: the width of the target's logits.
        num_guesses: how many tokens are wanted, >= 1.
        chosen: (1,) what a user's sampler has chosen; None where there is none.
    """
    settings, seed = opened.settings, opened.seed
    if chosen is not None:
        share = mx.softmax(logits[0].astype(mx.float32))[chosen[0]]
        return LazyGuesses(chosen, logit_check, likeliest(logits, num_guesses), share)
    if settings.rule == "match":
        found = likeliest(scores(logits, settings.drafting_temperature, seed, position, vocab_size), num_guesses)
        return LazyGuesses(found[0][:, 0], logit_check, found)
    # A decision to propose a token must not depend on the token (see `protocol.lookahead_policy`). So what counts is
    # what a draw from this q may expect, not what this draw may.
    probs = distribution(logits[0], settings.drafting_temperature)
    drawn = draw(probs, key_for(seed, Purpose.DRAFT, position, trail))
    return LazyGuesses(
        drawn[None], logit_check, likeliest(mx.log(probs)[None], num_guesses), (probs * probs).sum(), probs
    )


def _ranked(found: tuple[mx.array, mx.array], first: int = 0) -> tuple[Guess, ...]:
    """One row of `likeliest`, evaluated, as guesses with ranks from `first` on."""
    (tokens,), (shares,) = cast(tuple[list[list[int]], list[list[float]]], (found[0].tolist(), found[1].tolist()))
    return tuple(
        Guess(token, share, rank=rank, raw=share)
        for rank, (token, share) in enumerate(zip(tokens, map(_share, shares), strict=True), start=first)
        # What a filter left out is no guess, unless it is all there is.
        if share > 0.0 or rank == 0
    )


def _share(share: float) -> float:
    """Of a row in which processors left nothing it is NaN, and what comes there is as unlikely as can be."""
    return 0.0 if math.isnan(share) else share


def catch_up(
    sequence: CachedSequence, plan: FeedPlan, shared: Session, vocab_size: int, num_rows: int, history: TokenHistory
) -> list[tuple[int, float]] | RewoundToCheckpoint:
    """Read committed tokens, and guess what comes after each of the last `num_rows`.

    Args: as `DraftSteps`.

    Returns: (choice, how sure the drafter was of it) after each of the last tokens that were fed, in order.
    """
    if (length := sequence.rewind(plan.keep)) < plan.keep:
        return RewoundToCheckpoint(length, plan.keep)
    end = plan.keep + len(plan.feed)
    rows = sequence.feed(plan.feed, num_rows)
    assert rows is not None
    start, settings, seed = end - num_rows + 1, shared.opened.settings, shared.opened.seed
    logits = shared.logits_pipeline.shape(pad(rows, vocab_size), history, start)
    if (chosen := shared.logits_pipeline.sample(logits)) is not None:
        probs = mx.softmax(logits.astype(mx.float32), axis=-1)
        tokens, shares = chosen, mx.take_along_axis(probs, chosen[:, None], axis=-1)[:, 0]
    elif settings.rule == "match":
        tokens, shares = likeliest(scores(logits, settings.drafting_temperature, seed, start, vocab_size), 1)
        tokens, shares = tokens[:, 0], shares[:, 0]
    else:
        probs = distribution(logits, settings.drafting_temperature)
        tokens, shares = mx.argmax(probs, axis=-1), (probs * probs).sum(axis=-1)
    logit_check = LogitCheck.of(rows, rows)
    mx.eval(tokens, shares, *logit_check.arrays())
    sequence.check(end)
    if (num_sound := logit_check.num_sound()) < num_rows:
        logit_check.check(num_sound, start + num_sound, "draft")
    found = map(_share, cast(list[float], shares.tolist()))
    return list(zip(cast(list[int], tokens.tolist()), found, strict=True))
