"""Calibration: from the drafter's own confidence to how often it is right, learnt from what was accepted."""

from __future__ import annotations

import math

import attrs

from protocol.lookahead_tree import Guess

# Confidence is corrected in logits, by an offset that is learnt at this many knots and interpolated between them.
NUM_KNOTS = 7
FIRST_KNOT, LAST_KNOT = -4.0, 6.0
PRIOR_TOSSES = 3.0  # weight of the prior, an offset of 0, at each knot: as much as this many coin tosses
KNOT_MEMORY = 100.0  # observations after which a knot has forgotten all but 1/e
# The acceptance that is assumed of a drafter before it was tried, and its weight in observations: at first, and again
# when another text begins. It is optimistic, since a drafter that is never tried is never known.
PRIOR_ACCEPTANCE, PRIOR_WEIGHT, NEW_TEXT_WEIGHT = 0.8, 12.0, 6.0
LAST_STALENESS_CLASS = 4  # staleness is grouped as 0, 1, 2 to 3, 4 to 7, and 8 or more
MIN_CONFIDENCE, MAX_CONFIDENCE = 0.002, 0.9995


@attrs.define
class _Curve:
    _offsets: list[float] = attrs.field(factory=lambda: [0.0] * NUM_KNOTS)
    # Fisher information on each offset: p (1 - p), summed over the observations.
    _information: list[float] = attrs.field(factory=lambda: [0.25 * PRIOR_TOSSES] * NUM_KNOTS)

    def __call__(self, raw: float) -> float:
        """The modelled probability, in (0, 1), that a guess with this confidence is right."""
        logit = _logit(raw)
        knot, share = _knot_below(logit)
        offset = (1.0 - share) * self._offsets[knot] + share * self._offsets[knot + 1]
        probability = 1.0 / (1.0 + math.exp(min(700.0, -logit - offset)))
        return min(MAX_CONFIDENCE, max(MIN_CONFIDENCE, probability))

    def observe(self, raw: float, was_right: bool) -> None:
        """Learn from one guess: a step of Newton's method, with the past fading."""
        expected = self(raw)
        surprise, information = was_right - expected, expected * (1.0 - expected)
        keep, prior = 1.0 - 1.0 / KNOT_MEMORY, 0.25 * PRIOR_TOSSES
        knot, share = _knot_below(_logit(raw))
        for i, weight in ((knot, 1.0 - share), (knot + 1, share)):
            self._information[i] = prior + keep * (self._information[i] - prior) + weight * information
            self._offsets[i] += weight * surprise / self._information[i]

    def snapshot(self) -> _Curve:
        return attrs.evolve(self, offsets=list(self._offsets), information=list(self._information))


@attrs.define
class Calibration:
    """What is known of one drafter's confidence under one acceptance rule: a curve by kind of copy and staleness."""

    memory: float = 30.0  # observations over which `mean_acceptance` is averaged
    # How often, recently, the drafter's own choice was right, whatever its confidence; in [0, 1].
    mean_acceptance: float = PRIOR_ACCEPTANCE
    # The measured gain of speculating, as a share of what was predicted, in [0, 1]; 1 if it was not measured.
    trust: float = 1.0
    _weight: float = PRIOR_WEIGHT
    _curves: dict[tuple[int | None, int], _Curve] = attrs.field(factory=dict)

    def __call__(self, copy_kind: int | None, raw: float, staleness: int = 0) -> float:
        """The modelled probability, in (0, 1), that a guess of this kind, confidence and staleness is right."""
        return self._curve(copy_kind, staleness)(raw)

    def begin_text(self) -> None:
        """Move the mean acceptance towards the prior: the latest observations are about the last text, not this one."""
        if self._weight > PRIOR_WEIGHT:
            self._weight = NEW_TEXT_WEIGHT
            self.mean_acceptance += (PRIOR_ACCEPTANCE - self.mean_acceptance) / 4

    def snapshot(self) -> Calibration:
        """A copy that does not change with later observations."""
        return attrs.evolve(self, curves={key: curve.snapshot() for key, curve in self._curves.items()})

    def observe(self, guess: Guess, was_right: bool) -> None:
        """Learn from a guess that was checked against the committed text."""
        self._curve(guess.copy_kind, guess.staleness).observe(guess.raw, was_right)
        if not guess.is_copied:
            self.average(float(was_right))

    def observe_unjudged(self, raw: float) -> None:
        """Count a choice with this confidence if it is unknown whether it would have been accepted."""
        self.average(self(None, raw))

    def average(self, right: float) -> None:
        """Add a choice to the mean: 1 if it was right, 0 if not; the probability that it was, if only that is known."""
        self._weight = min(self.memory, self._weight + 1.0)
        self.mean_acceptance += (right - self.mean_acceptance) / self._weight

    def _curve(self, copy_kind: int | None, staleness: int) -> _Curve:
        return self._curves.setdefault((copy_kind, min(staleness.bit_length(), LAST_STALENESS_CLASS)), _Curve())


def _knot_below(logit: float) -> tuple[int, float]:
    """The knot below a logit, and how far the logit is on the way to the next knot, in [0, 1]."""
    along = (min(max(logit, FIRST_KNOT), LAST_KNOT) - FIRST_KNOT) / (LAST_KNOT - FIRST_KNOT) * (NUM_KNOTS - 1)
    knot = min(int(along), NUM_KNOTS - 2)
    return knot, along - knot


def _logit(probability: float) -> float:
    bounded = min(max(probability, MIN_CONFIDENCE), MAX_CONFIDENCE)
    return math.log(bounded / (1.0 - bounded))
