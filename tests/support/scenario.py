"""A scenario: the few numbers that describe a machine and a pair of models to the simulator.

The unit of time is T_v(1), the time that the target takes to decode one token.
"""

from __future__ import annotations

from bisect import bisect_left

import attrs

# The acceptance of a trained drafter falls from `acceptance` towards `stale_acceptance` with the number of its own
# hidden states that it drafts on: each of them leaves this share of the difference.
STALENESS_KEEPS = 0.75


@attrs.frozen
class Scenario:
    """A machine and a pair of models.

    Attributes:
        acceptance: probability that the draft's first choice is the target's token, in [0, 1].
        cost_ratio: time of a draft step over time of a decoding step of the target, T_d / T_v(1), > 0.
        contention: share of a draft step's time by which it delays the target when both run, in [0, 1]; 0 for separate
            hardware.
        verify_slope: slope S of verification, >= 0: verifying m tokens takes T_v(1)·(1 + S·(m − 1)).
        draft_slope: the slope of draft passes, >= 0: one over m tokens takes 1 + S·(m − 1) draft steps; None for the
            value of `verify_slope`.
        verify_table: instead of a slope, measured times of a target pass over 1, 2, 3, … tokens, in any unit, such as
            12.1,12.3,13.8; or WIDTH:TIME pairs, such as 1:12.1,2:12.3,8:20.5; with several streams, a width counts all
            rows of a pass.
        draft_table: the same for a draft pass.
        overhead: time added to each forward pass, in T_v(1), >= 0.
        second_choice: probability that the draft's second choice is right where its first is wrong, in [0, 1].
        stale_acceptance: for a drafter that was trained for the target: the limit, in [0, A], to which its acceptance
            falls as it drafts further on hidden states of its own, before the target's are there; None for a draft
            model, which reads none.
        spread: concentration of the Beta distribution of the draft's confidence, > 0; small for a draft that knows when
            it is right.
        overconfidence: how far the draft overstates its confidence, >= 0; 0 is calibrated.
        seed: seed of the text and of the drafts.
        acceptance_changes: pairs (token, acceptance): from that generated token on, that acceptance holds. Tokens are
            >= 1 and rise.

    At each position the draft's first choice is right with a probability drawn from the Beta distribution with mean
    `acceptance` and concentration `spread`. Its second choice is never likelier than the first, so it is right less
    often where the first is very unlikely. `overconfidence` multiplies its logits by 1 + overconfidence. With
    `stale_acceptance`, each hidden state of the drafter's own removes a quarter of the remaining difference, and its
    confidence does not show that. In a table (`verify_table`, `draft_table`) times between two widths are
    interpolated, and beyond the last one they rise as between the last two, if they rise there.
    """

    acceptance: float
    cost_ratio: float
    contention: float = 0.0
    verify_slope: float = 0.06
    draft_slope: float | None = None
    verify_table: tuple[tuple[int, float], ...] = ()
    draft_table: tuple[tuple[int, float], ...] = ()
    overhead: float = 0.0
    second_choice: float = 0.45
    stale_acceptance: float | None = None
    spread: float = 1.3
    overconfidence: float = 0.0
    seed: int = 0
    acceptance_changes: tuple[tuple[int, float], ...] = ()

    def relative_acceptance(self, staleness: int) -> float:
        """The acceptance of a token that was drafted on `staleness` hidden states of the drafter's own, relative to one
        that was drafted on none; in [0, 1].
        """
        if self.stale_acceptance is None or self.acceptance == 0.0:
            return 1.0
        least = self.stale_acceptance / self.acceptance
        return least + (1.0 - least) * STALENESS_KEEPS**staleness

    def verify_seconds(self, num_tokens: int) -> float:
        """Time of a target pass over `num_tokens` tokens, in units of T_v(1)."""
        return self.overhead + _relative_time(self.verify_table, self.verify_slope, num_tokens)

    def draft_seconds(self, num_tokens: int) -> float:
        """Time of a draft pass over `num_tokens` tokens, in units of T_v(1)."""
        slope = self.verify_slope if self.draft_slope is None else self.draft_slope
        return self.overhead + self.cost_ratio * _relative_time(self.draft_table, slope, num_tokens)


def _relative_time(table: tuple[tuple[int, float], ...], slope: float, width: int) -> float:
    if not table:
        return 1.0 + slope * (width - 1)
    if len(table) == 1 or width == 1:
        return 1.0
    right = min(bisect_left(table, (width, 0.0)), len(table) - 1)
    (low, low_time), (high, high_time) = table[max(right, 1) - 1], table[max(right, 1)]
    slope = (high_time - low_time) / (high - low)
    if width > high:
        return (high_time + (width - high) * max(0.0, slope)) / table[0][1]
    return (low_time + (width - low) * slope) / table[0][1]
