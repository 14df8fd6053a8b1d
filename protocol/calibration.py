"""How often a drafter that is so sure is right: its own confidence, corrected by what was accepted."""

from __future__ import annotations

import math

import attrs

from protocol.lookahead_tree import Guess

# Confidence is corrected in logits, by an offset that is known at so many places and interpolated between them.
NUM_PLACES = 7
FIRST_PLACE, LAST_PLACE = -4.0, 6.0
# A place believes the drafter itself for as much as so many coin tosses.
PRIOR_TOSSES = 3.0
# Observations after which a place has forgotten all but 1/e.
PLACE_MEMORY = 100.0
# By how much one surprise moves all places, in logits; and what of that is left after another observation. Texts
# change their character, and a place alone would take long to notice.
SHIFT_STEP = 0.15
SHIFT_KEPT = 0.97
# How often a drafter is taken to be right before it was tried, and for how many observations' worth: hopeful, since
# one that is never tried is never known.
HOPE, HOPE_WEIGHT, HOPE_WEIGHT_ANEW = 0.8, 12.0, 6.0
LEAST, MOST = 0.002, 0.9995


@attrs.define
class _Curve:
    """One rank's confidence, and what became of it."""

    _offsets: list[float] = attrs.field(factory=lambda: [0.0] * NUM_PLACES)
    # Fisher information on each offset: p (1 - p), summed over what was seen.
    _information: list[float] = attrs.field(factory=lambda: [0.25 * PRIOR_TOSSES] * NUM_PLACES)
    _shift: float = 0.0

    def __call__(self, raw: float) -> float:
        """The modelled probability, in (0, 1), of a guess with this confidence."""
        logit = _logit(raw)
        place, share = _place(logit)
        offset = (1.0 - share) * self._offsets[place] + share * self._offsets[place + 1]
        return min(MOST, max(LEAST, _expit(logit + offset + self._shift)))

    def observe(self, raw: float, was_right: bool) -> None:
        """Take note of what became of a guess: a step of Newton's method towards it, the past fading."""
        expected = self(raw)
        surprise, information = was_right - expected, expected * (1.0 - expected)
        keep, prior = 1.0 - 1.0 / PLACE_MEMORY, 0.25 * PRIOR_TOSSES
        place, share = _place(_logit(raw))
        for i, weight in ((place, 1.0 - share), (place + 1, share)):
            self._information[i] = prior + keep * (self._information[i] - prior) + weight * information
            self._offsets[i] += weight * surprise / self._information[i]
        self._shift = SHIFT_KEPT * self._shift + SHIFT_STEP * surprise

    def snapshot(self) -> _Curve:
        return attrs.evolve(self, offsets=list(self._offsets), information=list(self._information))

    def forget(self) -> None:
        """Believe the drafter a little more again."""
        self._shift *= SHIFT_KEPT


@attrs.define
class Calibration:
    """What is known of one drafter's confidence under one rule: a curve for each rank.

    Attributes:
        memory: observations over which `mean` is taken.
        mean: probability, in [0, 1], that the drafter's own choice at a place not looked at yet is right.
        trust: what speculating brought, of what a model of it had said from `mean` and the prices; in [0, 1].
    """

    memory: float = 30.0
    mean: float = HOPE
    trust: float = 1.0
    _curves: dict[int, _Curve] = attrs.field(factory=dict)
    _weight: float = HOPE_WEIGHT

    def begin_text(self) -> None:
        """Hope anew: another text is another chance, and what was seen last was about the last one."""
        if self._weight > HOPE_WEIGHT:
            self._weight = HOPE_WEIGHT_ANEW
            self.mean += (HOPE - self.mean) / 4

    def __call__(self, rank: int, raw: float) -> float:
        """The modelled probability, in (0, 1), that the committed text takes a guess."""
        return self._curve(rank)(raw)

    def snapshot(self) -> Calibration:
        """What is known by now; a copy that stays as it is."""
        curves = {rank: curve.snapshot() for rank, curve in self._curves.items()}
        return attrs.evolve(self, curves=curves)

    def observe(self, guess: Guess, was_right: bool) -> None:
        """Take note of what became of a guess."""
        self._curve(guess.rank).observe(guess.raw, was_right)
        if guess.rank == 0:
            self._average(float(was_right))

    def expect(self, raw: float) -> None:
        """Take note of a choice with this confidence, of which it cannot be known whether it would have stood."""
        self._average(self(0, raw))
        self._curve(0).forget()

    def _average(self, right: float) -> None:
        self._weight = min(self.memory, self._weight + 1.0)
        self.mean += (right - self.mean) / self._weight

    def _curve(self, rank: int) -> _Curve:
        return self._curves.setdefault(rank, _Curve())


def _place(logit: float) -> tuple[int, float]:
    """The place below a confidence, and how far, in [0, 1], it is from there to the next."""
    along = (min(max(logit, FIRST_PLACE), LAST_PLACE) - FIRST_PLACE) / (LAST_PLACE - FIRST_PLACE) * (NUM_PLACES - 1)
    place = min(int(along), NUM_PLACES - 2)
    return place, along - place


def _logit(probability: float) -> float:
    bounded = min(max(probability, LEAST), MOST)
    return math.log(bounded / (1.0 - bounded))


def _expit(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -700 else 0.0
