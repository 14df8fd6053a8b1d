"""The draft model's jobs on its own thread: draft steps, as many as a draft budget allows, and catching up."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import cast

import attrs
import mlx.core as mx

from actors.model import CachedSequence, CacheLostError, RewindMode
from actors.sampling.logits_pipeline import NO_HISTORY, LogitCheck, TokenHistory, pad
from actors.session import Session
from actors.trained.feature_input import FeatureInput
from actors.workers.core_sharing import CORES
from actors.workers.worker import Step
from protocol.acceptance import Decisions, distribution, draw, likeliest, likeliest_only, scores
from protocol.cached_tokens import FeedPlan
from protocol.lookahead_policy import EMPTY_BUDGET, DraftBudget
from protocol.lookahead_tree import Guess
from protocol.messages import Distribution, Sparse
from protocol.randomness import Purpose, further, key_for
from protocol.settings import Settings


@attrs.frozen
class DraftInput:
    """What one draft step starts from."""

    plan: FeedPlan  # how to bring the cache in line with the text that the drafted token comes after
    trail: int  # hash of that text; see `protocol.randomness.further`
    history: TokenHistory  # the end of that text
    budget: DraftBudget  # how far to go on without asking the policy

    @property
    def position(self) -> int:
        """Position of the token that is drafted."""
        return self.plan.keep + len(self.plan.feed)

    def following(self, token: int, feed: tuple[int, ...], budget: DraftBudget) -> DraftInput:
        """The input of the step after this one's token, which is in `feed` unless it was fed already."""
        plan = FeedPlan(self.position + 1 - len(feed), feed)
        return DraftInput(plan, further(self.trail, token), self.history.appended(token), budget)


@attrs.frozen
class Drafted:
    """What came of one draft step."""

    # The drafter's choice; None if nothing was fed, as the cache could not be rewound, or could not be after the feed.
    guess: Guess | None
    fed: FeedPlan  # what was done to the cache. Includes the choice if the step after it was launched.
    can_look_ahead: bool  # whether the cache could take an uncommitted token now, and drop it again
    num_lost: int = 0  # tokens that the cache was to keep, and has lost with the checkpoint


@attrs.frozen
class DraftSteps:
    """Draft steps in a row: the first drafts after a text, each of the others after the choice of the one before."""

    sequence: CachedSequence
    settled: int  # length of the committed text. The text to draft after may go beyond it.
    shared: Session
    vocab_size: int  # the width of the target's logits; ids beyond it, which pad the draft's embedding, are not drafted
    clock: Callable[[], float]  # returns seconds
    chains: bool | None  # see `DraftActor`
    # Unless the rule is match, tokens are drawn from this many of the likeliest; None for all. The rules are exact for
    # any distribution, and one of few tokens is short to send to another process.
    max_drawn_from: int | None = None

    def begin(self, start: DraftInput) -> Step[Drafted]:
        """Draft one token, and name the next step if there is one. Raises: NotANumberError: of the model's logits."""
        if (hindrance := self.prepare(start.plan)) is not None:
            return Step(hindrance)
        rows = self.sequence.feed(start.plan.feed, 1)
        assert rows is not None
        return self._read(start, self.guess(rows, start.position, start.trail, start.history))

    def prepare(self, plan: FeedPlan) -> Drafted | None:
        """Prepare the cache for a step; gives what came of it if nothing may be fed.

        Raises: CacheLostError: a step that the session shared has failed since this one was planned.
        """
        if self.sequence.length < plan.keep:
            raise CacheLostError
        if (length := self.sequence.rewind(plan.keep)) < plan.keep:
            return Drafted(None, FeedPlan(length, ()), True, num_lost=plan.keep - length)
        position = plan.keep + len(plan.feed)
        if position > self.settled and self.sequence.prepare(len(plan.feed), self.settled) is RewindMode.SINGLE:
            return Drafted(None, FeedPlan(plan.keep, ()), False)
        return None

    def _read(self, start: DraftInput, lazy: LazyGuesses) -> Step[Drafted]:
        """Read a guess back, and decide whether a step follows. A step that is likely to follow is launched first."""
        position, launched = start.position, None
        if self._may_chain() and start.budget.foresees_another(self.clock()) and self._can_look_ahead():
            mx.async_eval(*lazy.arrays())
            launched = self.guess(self.sequence.feed_lazy(lazy.choices), position + 1, 0, start.history)
            mx.async_eval(*launched.arrays())
        mx.eval(*lazy.arrays())
        (guess,) = lazy.read()
        lazy.logit_check.check(0, position, "draft")
        if launched is None:
            drafted, following = self.conclude(start, guess)
            return Step(drafted, None if following is None else partial(self.begin, following))
        self.sequence.check(position + 1)
        # The launched step has fed the choice, whether or not its own guess will be read.
        drafted = Drafted(guess, FeedPlan(start.plan.keep, (*start.plan.feed, guess.token)), True)
        if guess.token in self.shared.opened.stop_tokens:
            return Step(drafted)
        # Even if the budget is spent: the device works on this step already.
        remaining = start.budget.after(guess, self.clock()) or EMPTY_BUDGET
        return Step(drafted, partial(self._read, start.following(guess.token, (), remaining), launched))

    def conclude(self, start: DraftInput, guess: Guess) -> tuple[Drafted, DraftInput | None]:
        """Returns: what came of a step with this guess, and the input of the next one if the budget allows one."""
        # The choice is lost if the check fails, but whether it does never depends on which token was chosen.
        self.sequence.check(start.position)
        drafted = Drafted(guess, start.plan, self._can_look_ahead())
        # Nothing comes after the end of the text.
        if not drafted.can_look_ahead or guess.token in self.shared.opened.stop_tokens:
            return drafted, None
        if (remaining := start.budget.after(guess, self.clock())) is None:
            return drafted, None
        return drafted, start.following(guess.token, (guess.token,), remaining)

    def guess(self, rows: mx.array, position: int, trail: int, history: TokenHistory) -> LazyGuesses:
        """A guess at the token at a position, from the draft model's logits (1, V)."""
        return guesses_together([self], [rows], [position], trail, history)

    def _drawn(self, logits: mx.array, logit_check: LogitCheck, position: int, trail: int) -> LazyGuesses:
        opened, kept = self.shared.opened, None
        if self.max_drawn_from is not None:
            logits, kept = likeliest_only(logits, self.max_drawn_from)
        # A decision to propose a token must not depend on the token (see `protocol.lookahead_policy`). So the
        # confidence is the expectation over all draws from this distribution, not the probability of this draw.
        probs = distribution(logits[0], opened.settings.drafting_temperature)
        drawn = draw(probs, key_for(opened.seed, Purpose.DRAFT, position, trail))
        confidence = (probs * probs).sum()
        drawn_from = probs if kept is None else Sparse(probs.size, kept[0], probs[kept[0]])
        return LazyGuesses(drawn[None], confidence[None], logit_check, probs=drawn_from)

    def catch_up(self, plan: FeedPlan, num_rows: int, history: TokenHistory) -> list[tuple[int, float]] | Drafted:
        """Feed committed tokens, and guess the token after each of the last `num_rows` of them.

        Returns: (choice, confidence in it) for each of these, in order; or what `prepare` returns if nothing may be
            fed.
        Raises: NotANumberError: no token can be chosen from some row of logits. CacheLostError: see `prepare`.
        """
        if (hindrance := self.prepare(plan)) is not None:
            return hindrance
        end = plan.keep + len(plan.feed)
        rows = self.sequence.feed(plan.feed, num_rows)
        assert rows is not None
        pipeline, settings, seed = self.shared.logits_pipeline, self.shared.opened.settings, self.shared.opened.seed
        start = end - num_rows + 1
        logits = pipeline.shape(pad(rows, self.vocab_size), history, start)
        if (chosen := pipeline.sample(logits, start)) is not None:
            probs = mx.softmax(logits.astype(mx.float32), axis=-1)
            tokens, confidences = chosen, mx.take_along_axis(probs, chosen[:, None], axis=-1)[:, 0]
        elif pipeline.rule == "match":
            decisions = [(seed, start + i) for i in range(num_rows)]
            tokens, confidences = likeliest(scores(logits, settings.drafting_temperature, decisions, self.vocab_size))
        else:
            probs = distribution(logits, settings.drafting_temperature)
            tokens, confidences = mx.argmax(probs, axis=-1), (probs * probs).sum(axis=-1)
        if isinstance(self.sequence, FeatureInput) and (estimates := self.sequence.acceptance) is not None:
            confidences = mx.where(confidences > 0.0, estimates, 0.0)
        logit_check = LogitCheck.of(rows, rows)
        mx.eval(tokens, confidences, *logit_check.arrays)
        self.sequence.check(end)
        if (num_sound := logit_check.num_sound()) < num_rows:
            logit_check.check(num_sound, start + num_sound, "draft")
        sound_confidences = map(_zero_if_nan, cast(list[float], confidences.tolist()))
        return list(zip(cast(list[int], tokens.tolist()), sound_confidences, strict=True))

    @property
    def kind(self) -> Hashable | None:
        """What sessions must have in common to share array operations; None for one that shares none."""
        shared = self.shared
        settings, kind = shared.opened.settings, shared.logits_pipeline.kind
        if kind is None or shared.logits_pipeline.rule != "match":
            return None
        has_estimates = isinstance(self.sequence, FeatureInput) and self.sequence.acceptance is not None
        return kind, settings.drafting_temperature, has_estimates

    def _can_look_ahead(self) -> bool:
        return self.sequence.prepare(1, self.settled) is not RewindMode.SINGLE

    def _may_chain(self) -> bool:
        """Whether a step may be launched before the choice that it starts from is read back."""
        # The random key and some processors depend on the text before. A user's sampler is called with evaluated
        # arrays.
        logits_pipeline = self.shared.logits_pipeline
        if logits_pipeline.rule != "match" or logits_pipeline.needs_text or logits_pipeline.runs_user_code:
            return False
        if self.chains is not None:
            return self.chains
        # Beside another model, a CPU has no core left that would compute while the next step is prepared.
        return mx.default_device().type == mx.DeviceType.gpu or CORES.num_computing == 1


@attrs.frozen
class LazyGuesses:
    """Guesses at the next tokens of n sessions, which may not be computed yet."""

    choices: mx.array  # (n,) the drafter's choice for each session
    confidences: mx.array  # (n,) its confidence in each
    logit_check: LogitCheck  # of the draft model's own rows
    # The distribution that the choice was drawn from, (V,) or sparse; None under the match rule. n is 1.
    probs: Distribution | None = None
    staleness: Sequence[int] | None = None  # of each session; see `Guess`. None if all are 0.
    # (n,) the drafter's own estimate of how likely its choice is accepted, whichever that is; None if it makes none.
    acceptance: mx.array | None = None

    def of(self, sequences: Sequence[CachedSequence]) -> LazyGuesses:
        """With what the sequences, of which all or none estimate acceptance, say of the text that was fed last."""
        readers = [sequence for sequence in sequences if isinstance(sequence, FeatureInput)]
        if not readers:
            return self
        estimates = [reader.acceptance for reader in readers if reader.acceptance is not None]
        acceptance = mx.concatenate(estimates) if estimates else None
        return attrs.evolve(self, staleness=[reader.staleness for reader in readers], acceptance=acceptance)

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated together."""
        probs = (self.probs.tokens, self.probs.values) if isinstance(self.probs, Sparse) else (self.probs,)
        arrays = (self.choices, self.confidences, *self.logit_check.arrays, self.acceptance, *probs)
        return [array for array in arrays if array is not None]

    def read(self) -> list[Guess]:
        """The guess of each session. Reads arrays back, which should have been evaluated together before."""
        tokens = cast(list[int], self.choices.tolist())
        confidences = list(map(_zero_if_nan, cast(list[float], self.confidences.tolist())))
        # Where processors have left no token, none is likely, whatever the drafter estimates.
        if self.acceptance is not None:
            estimates = map(_zero_if_nan, cast(list[float], self.acceptance.tolist()))
            pairs = zip(confidences, estimates, strict=True)
            confidences = [estimate if confidence > 0.0 else confidence for confidence, estimate in pairs]
        staleness = self.staleness or [0] * len(tokens)
        return [
            Guess(token, confidence, self.probs, raw=confidence, staleness=stale)
            for token, confidence, stale in zip(tokens, confidences, staleness, strict=True)
        ]


def guesses_by_match(
    logits: mx.array, logit_check: LogitCheck, settings: Settings, decisions: Decisions, vocab_size: int
) -> LazyGuesses:
    """Guesses under the match rule, from (n, V) processed logits."""
    tokens, confidences = likeliest(scores(logits, settings.drafting_temperature, decisions, vocab_size))
    # Adding 0 gives the choice a buffer of its own. A view would share another array's, and on CUDA, reading that array
    # back moves the buffer while the next step, which was launched before, may still be reading it.
    return LazyGuesses(tokens + 0, confidences, logit_check)


def guesses_together(
    steps: Sequence[DraftSteps],
    logits: Sequence[mx.array],
    positions: Sequence[int],
    trail: int = 0,
    history: TokenHistory = NO_HISTORY,
) -> LazyGuesses:
    """Guesses for sessions of one kind, each as if alone, or for one session, from (1, V) logits of each."""
    first, opened, pipeline = steps[0], steps[0].shared.opened, steps[0].shared.logits_pipeline
    rows = mx.concatenate(list(logits)) if len(logits) > 1 else logits[0]
    shaped = pipeline.shape(pad(rows, first.vocab_size), history, positions[0])
    # Only the model's own logits are checked. Processors may leave nothing to choose from after a drafted text that
    # will never be committed, which is not a failure of the drafter.
    logit_check = LogitCheck.of(rows, rows)
    if (chosen := pipeline.sample(shaped, positions[0])) is not None:
        lazy = LazyGuesses(chosen, mx.softmax(shaped[0].astype(mx.float32))[chosen], logit_check)
    elif pipeline.rule == "match":
        decisions = [(each.shared.opened.seed, position) for each, position in zip(steps, positions, strict=True)]
        lazy = guesses_by_match(shaped, logit_check, opened.settings, decisions, first.vocab_size)
    else:
        lazy = first._drawn(shaped, logit_check, positions[0], trail)
    return lazy.of([each.sequence for each in steps])


def _zero_if_nan(confidence: float) -> float:
    """The confidence, or 0 for a row in which processors left no token, whose probabilities are NaN."""
    return 0.0 if math.isnan(confidence) else confidence
