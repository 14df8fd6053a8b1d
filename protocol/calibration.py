"""How often a drafter that is so sure is right: its own confidence, corrected by what was accepted."""

from __future__ import annotations

import math

import attrs

from protocol.tree import Guess

NUM_BINS = 12
# A bin believes the drafter itself for as much as so many observations.
PRIOR_WEIGHT = 3.0
# Observations after which a bin has forgotten all but 1/e.
BIN_MEMORY = 100.0
# By how much one surprise moves all bins, in logits; and what of that is left after another observation. Texts
# change their character, and a bin alone would take long to notice.
SHIFT_STEP = 0.15
SHIFT_KEPT = 0.97
# How often a drafter is taken to be right before it was tried, and for how many observations' worth: hopeful, since
# one that is never tried is never known.
HOPE, HOPE_WEIGHT = 0.8, 12.0
LEAST, MOST = 0.002, 0.998


@attrs.define
class _Bin:
    hits: float = 0.0
    weight: float = 0.0


@attrs.define
class _Curve:
    """One rank's confidence, binned in logits, and what became of it."""

    _bins: list[_Bin] = attrs.field(factory=lambda: [_Bin() for _ in range(NUM_BINS)])
    _shift: float = 0.0

    def __call__(self, raw: float) -> float:
        """The modelled probability, in (0, 1), of a guess with this confidence."""
        return _expit(_logit(self._in_bin(raw)) + self._shift)

    def observe(self, raw: float, was_right: bool) -> None:
        surprise = was_right - self(raw)
        bin = self._bins[_index(raw)]
        keep = 1.0 - 1.0 / BIN_MEMORY
        bin.hits = keep * bin.hits + was_right
        bin.weight = keep * bin.weight + 1.0
        self._shift = SHIFT_KEPT * self._shift + SHIFT_STEP * surprise

    def _in_bin(self, raw: float) -> float:
        bin = self._bins[_index(raw)]
        return (bin.hits + PRIOR_WEIGHT * raw) / (bin.weight + PRIOR_WEIGHT)

    def forget(self) -> None:
        """Believe the drafter a little more again."""
        self._shift *= SHIFT_KEPT


@attrs.define
class Calibration:
    """What is known of one drafter's confidence under one rule: a curve for each rank.

    Attributes:
        mean: probability, in [0, 1], that the drafter's own choice at a place not looked at yet is right.
    """

    memory: float = 30.0
    mean: float = HOPE
    _curves: dict[int, _Curve] = attrs.field(factory=dict)
    _weight: float = HOPE_WEIGHT

    def begin_text(self) -> None:
        """Hope anew: another text is another chance, and what was seen last was about the last one."""
        if self._weight > HOPE_WEIGHT:
            self._weight, self.mean = HOPE_WEIGHT, (self.mean + HOPE) / 2

    def __call__(self, rank: int, raw: float) -> float:
        """The modelled probability, in (0, 1), that the committed text takes a guess."""
        return self._curve(rank)(raw)

    def observe(self, guess: Guess, was_right: bool) -> None:
        """Take note of what became of a guess."""
        self._curve(guess.rank).observe(guess.raw, was_right)
        if guess.rank == 0:
            self._weight = min(self.memory, self._weight + 1.0)
            self.mean += (was_right - self.mean) / self._weight

    def expect(self, raw: float) -> None:
        """Take note of a choice with this confidence, of which it cannot be known whether it would have stood."""
        expected = self(0, raw)
        self._weight = min(self.memory, self._weight + 1.0)
        self.mean += (expected - self.mean) / self._weight
        self._curve(0).forget()

    def _curve(self, rank: int) -> _Curve:
        return self._curves.setdefault(rank, _Curve())


def _index(raw: float) -> int:
    """The bin of a confidence; bins are of equal width in logits from -4 to 4."""
    return max(0, min(NUM_BINS - 1, int((_logit(raw) + 4.0) / 8.0 * NUM_BINS)))


def _logit(probability: float) -> float:
    bounded = min(max(probability, LEAST), MOST)
    return math.log(bounded / (1.0 - bounded))


def _expit(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))
