"""A scripted pair of models: a target that knows the text, and a draft that is right as often as a scenario says.

Both compute their logits from a hash of the text so far, so they need no weights and give the same text each time.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from scenario import Scenario
from scripted_sequence import ReadsFeatures, RecordsEmptyFeatures, ScriptedSequence

from actors.model import FeedsEach

VOCAB_SIZE = 64

# Concentration of the Beta distribution of the draft's confidence; small for a draft that knows when it is right.
SPREAD = 1.3
# Probability that its second choice is right where its first is wrong.
SECOND_CHOICE = 0.45

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


@lru_cache(maxsize=32)
def _beta_draws(mean: float) -> tuple[float, ...]:
    """A table of draws from a Beta distribution; with a mean of 0 or 1, every draw equals the mean."""
    if mean in (0.0, 1.0):
        return (float(mean),) * _NUM_PROBS
    draws = random.Random(0)
    return tuple(draws.betavariate(mean * SPREAD, (1.0 - mean) * SPREAD) for _ in range(_NUM_PROBS))


class _Sequence(ScriptedSequence):
    def __init__(self, row: Callable[[int, int, int], Sequence[float]], seed: int) -> None:
        super().__init__()
        self._row = row
        self._histories = [_after(0, seed)]  # by number of tokens

    def row(self, length: int) -> Sequence[float]:
        return self._row(self._histories[length], length, self.staleness_at(length))

    def take(self, tokens: tuple[int, ...]) -> None:
        super().take(tokens)
        for token in tokens:
            self._histories.append(_after(self._histories[-1], token))

    def cut(self, length: int) -> None:
        super().cut(length)
        del self._histories[length + 1 :]


class _RecordingSequence(RecordsEmptyFeatures, _Sequence):
    """One text of a target whose hidden states a drafter reads. To the drafter, it only matters which have come."""


class _TrainedSequence(ReadsFeatures, _Sequence):
    """One text of a drafter that reads the target's hidden states, and its own where those have not come."""


class ScriptedTarget(FeedsEach):
    """A target that knows the text: only the true token has a logit above 0."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self.records_features = scenario.stale_acceptance is not None

    def open_sequence(self, *, alongside_model: bool) -> _Sequence:
        return (_RecordingSequence if self.records_features else _Sequence)(self._row, self._seed)

    def _row(self, history: int, _length: int, _staleness: int) -> list[float]:
        row = [0.0] * VOCAB_SIZE
        row[_draw(history, _TEXT) % VOCAB_SIZE] = 1.0
        return row


class ScriptedDraft(FeedsEach):
    """A draft that is right as often as its probabilities say, unless it has read hidden states of its own."""

    vocab_size = VOCAB_SIZE
    context_length = None

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._changes_at = [len(PROMPT) + token for token, _ in scenario.acceptance_changes]
        means = (scenario.acceptance, *(acceptance for _, acceptance in scenario.acceptance_changes))
        self._probs = [_beta_draws(mean) for mean in means]
        self._is_trained = scenario.stale_acceptance is not None

    def open_sequence(self, *, alongside_model: bool) -> _Sequence:
        return (_TrainedSequence if self._is_trained else _Sequence)(self._row, self._scenario.seed)

    def _row(self, history: int, length: int, staleness: int) -> list[float]:
        """(VOCAB_SIZE,) logits after a history of `length` tokens. The draft does not know how stale it is."""
        luck = _draw(history, _LUCK)
        prob = self._probs[bisect_right(self._changes_at, length)][luck % _NUM_PROBS]
        # The second choice is never likelier than the first.
        second_prob = min((1.0 - prob) * SECOND_CHOICE, prob)
        share = self._scenario.relative_acceptance(staleness)
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
        return math.log(max(prob, _MIN_PROB))
