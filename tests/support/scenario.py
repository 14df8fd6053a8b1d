"""A scenario: the few numbers that describe a machine and a pair of models to the simulator.

The unit of time is T_v(1), the time that the target takes to decode one token.
"""

from bisect import bisect_left

import attrs

# The acceptance of a trained drafter falls from `acceptance` towards `stale_acceptance` with the number of its own
# hidden states that it drafts on: each of them leaves this share of the difference.
STALENESS_KEEPS = 0.75


@attrs.frozen
class Scenario:
    """A machine and a pair of models. The unit of time is T_v(1), that of a decoding step of the target.

    Attributes:
        acceptance: probability that the draft's first choice is the target's token, in [0, 1]; drawn for each position
            from the Beta distribution with this mean and the concentration `SPREAD`.
        cost_ratio: time of a draft step, T_d / T_v(1), > 0.
        contention: share of a draft step's time by which it delays the target when both run, in [0, 1]; 0 for separate
            hardware.
        verify_slope: slope S of verification, >= 0: verifying m tokens takes T_v(1)·(1 + S·(m − 1)).
        draft_slope: the slope of draft passes, in draft steps; None for the value of `verify_slope`.
        verify_table: instead of a slope, pairs of a width and the measured time of a target pass, in any unit; with
            several streams, a width counts all rows of a pass. Between two widths times are interpolated, and beyond
            the last one they rise as between the last two, if they rise there.
        draft_table: the same for a draft pass.
        stale_acceptance: for a drafter that was trained for the target: the limit, in [0, acceptance], to which its
            acceptance falls as it drafts further on hidden states of its own. Each of these removes a quarter of the
            remaining difference, and its confidence does not show that. None for a draft model, which reads none.
        seed: of the text and of the drafts.
        acceptance_changes: pairs (token, acceptance): from that generated token on, that acceptance holds. Tokens are
            >= 1 and rise.
    """

    acceptance: float
    cost_ratio: float
    contention: float = 0.0
    verify_slope: float = 0.06
    draft_slope: float | None = None
    verify_table: tuple[tuple[int, float], ...] = ()
    draft_table: tuple[tuple[int, float], ...] = ()
    stale_acceptance: float | None = None
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
        return _relative_time(self.verify_table, self.verify_slope, num_tokens)

    def draft_seconds(self, num_tokens: int) -> float:
        """Time of a draft pass over `num_tokens` tokens, in units of T_v(1)."""
        slope = self.verify_slope if self.draft_slope is None else self.draft_slope
        return self.cost_ratio * _relative_time(self.draft_table, slope, num_tokens)


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
