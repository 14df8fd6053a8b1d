"""A scripted pair of models: a target that knows the text, and a draft that is right as often as a scenario says.

Both compute their logits from a hash of the text so far, so they need no weights and give the same text each time.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import mlx.core as mx

from actors.model import CannotFork, FeedsEach, RecordsNothing, RewindMode
from protocol.errors import RewindError
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_features import ReadsFeatures, RecordsEmptyFeatures

VOCAB_SIZE = 64

# One token, so that no prefill comes before the first round.
PROMPT = (0,)

_MASK = (1 << 64) - 1
# Odd multipliers of the SplitMix64 and MurmurHash3 finalisers, which spread close values over all bits. One mixes; the
# other two make independent draws for the text and for the draft's luck.
_MIX, _TEXT, _LUCK = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xC4CEB9FE1A85EC53

_NUM_PROBS = 1 << 14
# The probability that stands for zero in a logit.
_MIN_PROB = 1e-9


def _after(history: int, token: int) -> int:
    """The hash of a history with one more token. It depends on every token and takes constant time."""
    mixed = ((history ^ (token + 1)) * _MIX) & _MASK
    return mixed ^ (mixed >> 29)


def _draw(history: int, purpose: int) -> int:
    """A number in [0, 2**64) drawn for one purpose from the hash of a history."""
    mixed = ((history ^ (history >> 32)) * purpose) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX) & _MASK
    return mixed ^ (mixed >> 31)


def _truth(history: int) -> int:
    """The target's token after a history."""
    return _draw(history, _TEXT) % VOCAB_SIZE


@lru_cache(maxsize=32)
def _beta_draws(mean: float, spread: float) -> tuple[float, ...]:
    """A table of draws from a Beta distribution; with a mean of 0 or 1, every draw equals the mean."""
    if mean in (0.0, 1.0):
        return (float(mean),) * _NUM_PROBS
    draws = random.Random(0)
    return tuple(draws.betavariate(mean * spread, (1.0 - mean) * spread) for _ in range(_NUM_PROBS))


class _ScriptedSequence(CannotFork, RecordsNothing):
    """One text in a scripted model: a hash for each of its prefixes."""

    def __init__(self, rows: Callable[[list[int], int], mx.array], history: int) -> None:
        self._rows = rows
        self._histories = [history]  # by number of tokens

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        histories = self._histories
        history = histories[-1]
        for token in tokens:
            history = _after(history, token)
            histories.append(history)
        return self._rows(histories, num_logits) if num_logits else None

    def feed_lazy(self, token: mx.array) -> mx.array:
        self._histories.append(_after(self._histories[-1], cast(int, token.item())))
        return self._rows(self._histories, 1)

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode.TRIM

    def rewind(self, length: int) -> int:
        if length >= len(self._histories):
            raise RewindError(f"asked a script for length {length}, it holds {len(self._histories) - 1}")
        del self._histories[length + 1 :]
        return length

    def check(self, length: int) -> None:
        if length != len(self._histories) - 1:
            raise RewindError(f"a script should hold {length} tokens, it holds {len(self._histories) - 1}")

    def forget(self) -> None:
        del self._histories[1:]

    @property
    def length(self) -> int:
        return len(self._histories) - 1

    def close(self) -> None:
        self._histories.clear()

    num_bytes = 0  # a list of hashes does not count
    needs_prefix_checkpoints = False  # it can always go back
    depends_on_passes = False

    def add_prefix_checkpoint(self) -> None:
        """See `CachedSequence.add_prefix_checkpoint`."""

    def reusable_length(self, num_common: int, num_read: int) -> int:
        return min(num_common, len(self._histories) - 1)

    def reuse(self, length: int) -> None:
        self.rewind(length)


class _RecordingSequence(RecordsEmptyFeatures, _ScriptedSequence):
    """One text of a target whose hidden states a drafter reads. The drafter looks only at which have come."""

    def forget(self) -> None:
        super().forget()
        self.forget_taken()


class _TrainedSequence(ReadsFeatures, _ScriptedSequence):
    """One text of a drafter that reads the target's hidden states, and its own where those have not come."""

    def __init__(self, row: Callable[[int, int, int], list[float]], history: int) -> None:
        """Make an empty text.

        Args:
            row: (hash of the text so far, its length, staleness) → logits.
            history: hash of the empty text.
        """
        super().__init__(self._stale_rows, history)
        self._row = row

    def _stale_rows(self, histories: list[int], num_logits: int) -> mx.array:
        first = len(histories) - num_logits
        return mx.array([self._row(histories[n], n, self.staleness_at(n)) for n in range(first, len(histories))])

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self.note_read(self._num_read, self._num_read + len(tokens))
        return super().feed(tokens, num_logits)

    def feed_lazy(self, token: mx.array) -> mx.array:
        self.note_read(self._num_read, self._num_read + 1)
        return super().feed_lazy(token)

    def rewind(self, length: int) -> int:
        remaining = super().rewind(min(length, self.length))
        self.note_rewound(remaining)
        return remaining

    def forget(self) -> None:
        super().forget()
        self.forget_stale()

    @property
    def length(self) -> int:
        return self.usable_length(self._num_read)

    @property
    def staleness(self) -> int:
        return self.staleness_at(self._num_read)

    @property
    def _num_read(self) -> int:
        return len(self._histories) - 1


class ScriptedTarget(FeedsEach):
    """A target that knows the text: only the true token has a logit above 0."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._records = scenario.stale_acceptance is not None

    def open_sequence(self, *, beside_another: bool) -> _ScriptedSequence:
        kind = _RecordingSequence if self._records else _ScriptedSequence
        return kind(self._rows, _after(0, self._seed))

    def _rows(self, histories: list[int], num_logits: int) -> mx.array:
        rows = []
        for history in histories[-num_logits:]:
            row = [0.0] * VOCAB_SIZE
            row[_truth(history)] = 1.0
            rows.append(row)
        return mx.array(rows)


class ScriptedDraft(FeedsEach):
    """A draft that is right as often as its probabilities say, unless the scenario makes it overconfident."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._second_choice = scenario.second_choice
        self._sharpness = 1.0 + scenario.overconfidence
        self._changes_at = [len(PROMPT) + token for token, _ in scenario.acceptance_changes]
        means = (scenario.acceptance, *(acceptance for _, acceptance in scenario.acceptance_changes))
        self._probs = [_beta_draws(mean, scenario.spread) for mean in means]
        self._is_trained = scenario.stale_acceptance is not None
        self._relative_acceptance = scenario.relative_acceptance

    def open_sequence(self, *, beside_another: bool) -> _ScriptedSequence:
        if self._is_trained:
            return _TrainedSequence(self._row, _after(0, self._seed))
        return _ScriptedSequence(self._rows, _after(0, self._seed))

    def _rows(self, histories: list[int], num_logits: int) -> mx.array:
        first = len(histories) - num_logits
        return mx.array([self._row(histories[length], length) for length in range(first, len(histories))])

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        return "a trained drafter reads one text at a time" if self._is_trained else None

    def _row(self, history: int, length: int, staleness: int = 0) -> list[float]:
        """(VOCAB_SIZE,) logits after a history of `length` tokens. The draft does not know how stale it is."""
        luck = _draw(history, _LUCK)
        prob = self._probs[bisect_right(self._changes_at, length)][luck % _NUM_PROBS]
        # The second choice is never likelier than the first.
        second_prob = min((1.0 - prob) * self._second_choice, prob)
        share = self._relative_acceptance(staleness)
        first, second = self._choices(history, luck, share * prob, share * second_prob)
        row = [self._logit((1.0 - prob - second_prob) / (VOCAB_SIZE - 2))] * VOCAB_SIZE
        # The first choice is the argmax even where it is as unlikely as any other token.
        row[second] = min(self._logit(second_prob), self._logit(prob))
        row[first] = max(self._logit(prob), *row) + 1e-3
        return row

    def _choices(self, history: int, luck: int, prob: float, second_prob: float) -> tuple[int, int]:
        """The draft's first and second choice; at most one of them is the true token."""
        text = _draw(history, _TEXT)
        truth = text % VOCAB_SIZE
        # Two more tokens, different from the true one and from each other: offsets modulo the vocabulary.
        offset = 1 + (text >> 16) % (VOCAB_SIZE - 1)
        other = (truth + offset) % VOCAB_SIZE
        another = (truth + 1 + (offset + (text >> 32) % (VOCAB_SIZE - 2)) % (VOCAB_SIZE - 1)) % VOCAB_SIZE
        drawn = (luck >> 24) / (1 << 40)
        if drawn < prob:
            return truth, other
        return (other, truth) if drawn < prob + second_prob else (other, another)

    def _logit(self, prob: float) -> float:
        return self._sharpness * math.log(max(prob, _MIN_PROB))
