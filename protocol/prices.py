"""Prices: what a forward pass costs and what speculating gains, measured while the models work.

T_v(m) is the time to verify m tokens, affine in m. T_d is the time of a draft step. κ is the share of a draft step by
which it delays the target when both run. R is the rate of committed tokens. Machines, caches and other programs change,
so all of these are averages in which the past fades.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from protocol.calibration import Calibration


@attrs.define
class WidthPrice:
    """Seconds of a forward pass, as an affine function of its width.

    An exponentially weighted least-squares fit: a pass that was measured `memory` passes ago counts for 1/e.

    Attributes:
        memory: in passes, > 1.
    """

    memory: float = 50.0
    _weight: float = attrs.field(default=0.0, init=False)
    _mean_width: float = attrs.field(default=0.0, init=False)
    _mean_s: float = attrs.field(default=0.0, init=False)
    _mean_width_squared: float = attrs.field(default=0.0, init=False)
    _mean_product: float = attrs.field(default=0.0, init=False)
    # (mean width, mean seconds, seconds per token), assigned as one value, since other threads read it.
    _fit: tuple[float, float, float] = attrs.field(default=(0.0, 0.0, 0.0), init=False)

    def observe(self, width: int, seconds: float) -> None:
        """Add the measurement of a pass of `width` tokens."""
        keep = 1.0 - 1.0 / self.memory
        self._weight = keep * self._weight + 1.0
        share = 1.0 / self._weight
        self._mean_width += share * (width - self._mean_width)
        self._mean_s += share * (seconds - self._mean_s)
        self._mean_width_squared += share * (width * width - self._mean_width_squared)
        self._mean_product += share * (width * seconds - self._mean_product)
        spread = self._mean_width_squared - self._mean_width**2
        # The slope is 0 until passes of two widths were measured.
        slope = max(0.0, (self._mean_product - self._mean_width * self._mean_s) / spread) if spread > 1e-9 else 0.0
        self._fit = self._mean_width, self._mean_s, slope

    @property
    def is_known(self) -> bool:
        """Whether a pass was measured."""
        return self._weight > 0

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs, >= 0; 0 until passes of two widths were measured."""
        return self._fit[2]

    def __call__(self, width: int) -> float:
        """Seconds that a pass of `width` tokens is expected to take, >= 0; 0 before the first."""
        mean_width, mean_seconds, slope = self._fit
        return max(0.0, mean_seconds + slope * (width - mean_width))


# What is assumed before anything was measured, and with the weight of how many observations: the cost of one more token
# as a share of the first pass's time, and the target's slowdown.
PRIOR_SLOPE, PRIOR_SLOPE_WEIGHT = 0.1, 1.0
PRIOR_SLOWDOWN, PRIOR_SLOWDOWN_WEIGHT = 0.1, 0.1
# A measurement counts for at most this many times what was expected: a pass during which the machine did something else
# must not bend the fit.
MAX_SURPRISE = 3.0


def _solved(sums: Sequence[float]) -> tuple[float, float, float]:
    """The fit of a `ContendedPrice`.

    Args:
        sums: the weighted sums of 1, x, z, x², xz, z², y, xy and zy over the passes, with x = width - 1, z = overlap
            and y = seconds; times are in units of the first pass.

    Returns: (time of a pass of one token, time of each further token, target slowdown); times in the same units.
    """
    n, x, z, xx, xz, zz, y, xy, zy = sums
    xx, xy = xx + PRIOR_SLOPE_WEIGHT, xy + PRIOR_SLOPE_WEIGHT * PRIOR_SLOPE
    zz, zy = zz + PRIOR_SLOWDOWN_WEIGHT, zy + PRIOR_SLOWDOWN_WEIGHT * PRIOR_SLOWDOWN
    n = max(n, 1e-9)
    # Eliminate the constant, which leaves two unknowns. The prior's weights are lower bounds, but for rounding.
    xx, xz, zz = max(PRIOR_SLOPE_WEIGHT, xx - x * x / n), xz - x * z / n, max(PRIOR_SLOWDOWN_WEIGHT, zz - z * z / n)
    xy, zy = xy - x * y / n, zy - z * y / n
    determinant = max(PRIOR_SLOPE_WEIGHT * PRIOR_SLOWDOWN_WEIGHT, xx * zz - xz * xz)
    slope = max(0.0, (xy * zz - zy * xz) / determinant)
    slowdown = min(0.9, max(0.0, (zy - xz * slope) / zz))
    slope = max(0.0, (xy - xz * slowdown) / xx)
    return (y - slope * x - slowdown * z) / n, slope, slowdown


@attrs.define
class ContendedPrice:
    """Seconds of a target's pass, as an affine function of its width and of the time a drafter worked beside it.

    An exponentially weighted least-squares fit over (1, width - 1, overlap) with a weak prior. The prior keeps a
    coefficient that the passes do not determine (where the width never changes) at its assumed value.

    Attributes:
        memory: in passes, > 1.
    """

    memory: float = 60.0
    _sums: list[float] = attrs.field(factory=lambda: [0.0] * 9, init=False)
    _unit_s: float = attrs.field(default=0.0, init=False)
    # Solved when a pass is added, so that reading, which other threads do too, writes nothing.
    _solution: tuple[float, float, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._solution = _solved(self._sums)

    def observe(self, width: int, overlap_s: float, seconds: float) -> None:
        """Add the measurement of a pass.

        Args:
            width: tokens, >= 1.
            overlap_s: seconds of the pass for which a drafter worked beside it.
            seconds: of the whole pass.
        """
        if self._unit_s == 0.0:
            self._unit_s = seconds
            if seconds <= 0.0:
                return
        elif self._sums[0] > 4.0:
            seconds = min(seconds, MAX_SURPRISE * self(width, overlap_s))
        keep = 1.0 - 1.0 / self.memory
        x, z, y = width - 1.0, overlap_s / self._unit_s, seconds / self._unit_s
        for i, term in enumerate((1.0, x, z, x * x, x * z, z * z, y, x * y, z * y)):
            self._sums[i] = keep * self._sums[i] + term
        self._solution = _solved(self._sums)

    @property
    def is_known(self) -> bool:
        """Whether a pass was measured."""
        return self._unit_s > 0.0

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs, >= 0."""
        return self._solution[1] * self._unit_s

    @property
    def target_slowdown(self) -> float:
        """Seconds by which a pass takes longer for each second that a drafter works beside it, in [0, 0.9]."""
        return self._solution[2]

    def __call__(self, width: int, overlap_s: float = 0.0) -> float:
        """Seconds that a pass is expected to take, >= 0; 0 before the first was measured.

        Args:
            width: tokens, >= 1.
            overlap_s: seconds for which a drafter will work beside it.
        """
        base, slope, slowdown = self._solution
        return max(0.0, (base + slope * (width - 1)) * self._unit_s + slowdown * overlap_s)


@attrs.define
class Mean:
    """An exponentially weighted mean.

    Attributes:
        memory: in observations, > 1.
        value: 0 before the first.
    """

    memory: float = 50.0
    value: float = 0.0
    _weight: float = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self._weight = min(self.memory, self._weight + 1.0)
        self.value += (value - self.value) / self._weight

    @property
    def is_known(self) -> bool:
        """Whether there was a value."""
        return self._weight > 0


@attrs.frozen
class Estimates:
    """A snapshot of what a runtime has measured of its two models; 0 where nothing was measured yet.

    Attributes:
        verify_seconds: T_v(1): a verify pass over one token, with no drafter beside it.
        verify_seconds_per_token: what each further token adds to it.
        draft_seconds: T_d: a draft step while the target waits.
        contention: κ: the share of a draft step's time by which it delays the target when both run; about in [0, 1].
        plain_seconds: a token decoded without a drafter.
        tokens_per_second: R, recently, while speculating.
        acceptance: the probability, recently, that a drafted token is accepted, in [0, 1].
    """

    verify_seconds: float
    verify_seconds_per_token: float
    draft_seconds: float
    contention: float
    plain_seconds: float
    tokens_per_second: float
    acceptance: float


# Acceptance rules of which the calibration is remembered. Clients choose temperatures as they like, and each
# temperature makes a rule of its own.
MAX_RULES = 16
# Rounds over which the speculative rate is averaged.
RATE_MEMORY_ROUNDS = 40.0


@attrs.define
class Prices:
    """Everything that a runtime measures of its models, for the rules of `protocol.lookahead_policy`.

    Prices outlive streams: a stream begins with what earlier ones have measured.

    Attributes:
        verify: seconds of a target's pass.
        draft_alone: seconds of a draft step while the target waits, by width.
        draft_slowdown: by what factor a draft step takes longer while the target works.
        plain_decode_s: seconds of a token decoded without a drafter, the trip through the event loop included.
        hit_rate: how often, recently, the text of a verdict had been drafted for, in [0, 1].
    """

    verify: ContendedPrice = attrs.field(factory=ContendedPrice)
    draft_alone: WidthPrice = attrs.field(factory=WidthPrice)
    draft_slowdown: Mean = attrs.field(factory=lambda: Mean(memory=50.0))
    plain_decode_s: Mean = attrs.field(factory=lambda: Mean(memory=50.0))
    hit_rate: Mean = attrs.field(factory=lambda: Mean(memory=30.0))
    _calibrations: dict[object, Calibration] = attrs.field(factory=dict)
    _last_calibration: Calibration = attrs.field(factory=Calibration)
    # Tokens and seconds of speculative rounds, weighted alike.
    _speculative_tokens: float = 0.0
    _speculative_s: float = 0.0
    _draft_steps: deque[tuple[float, float]] = attrs.field(factory=lambda: deque(maxlen=256))  # (began, ended)
    _unpriced_passes: deque[tuple[int, float, float]] = attrs.field(factory=deque)  # (width, began, ended)

    # --- measurements -----------------------------------------------------------------------------

    def observe_draft_step(self, width: int, began_s: float, ended_s: float, *, beside_target: bool) -> None:
        """Add a draft step over `width` tokens, and whether the target worked meanwhile."""
        seconds = ended_s - began_s
        if not beside_target or not self.draft_alone.is_known:
            self.draft_alone.observe(width, seconds)
        elif (expected_s := self.draft_alone(width)) > 0:
            self.draft_slowdown.observe(min(seconds / expected_s, MAX_SURPRISE))
        self._draft_steps.append((began_s, ended_s))
        self._price_passes(until_s=ended_s)

    def observe_verify_pass(self, width: int, began_s: float, ended_s: float) -> None:
        """Add a target's pass over `width` tokens."""
        self._price_passes(until_s=ended_s)
        # A draft step that ran beside the end of this pass is heard of only when that step has ended.
        self._unpriced_passes.append((width, began_s, ended_s))

    def observe_round(self, num_tokens: int, seconds: float) -> None:
        """Add a speculative round: the tokens that it committed, and the time from the last verdict to its own."""
        keep = 1.0 - 1.0 / RATE_MEMORY_ROUNDS
        self._speculative_tokens = keep * self._speculative_tokens + num_tokens
        self._speculative_s = keep * self._speculative_s + seconds

    def reset_speculative_rate(self) -> None:
        """Replace the measured speculative rate by the modelled one, with the weight of a few rounds."""
        rounds = 3.0
        self._speculative_s = rounds * self.verify(2)
        self._speculative_tokens = self._speculative_s * self.modelled_rate(self._last_calibration.mean_acceptance)

    def forget_drafter(self) -> None:
        """Forget what the last drafter cost and how often it was right, because another one comes."""
        self.draft_alone = WidthPrice()
        self.draft_slowdown = Mean(memory=50.0)
        self.hit_rate = Mean(memory=30.0)
        self._calibrations.clear()
        self._last_calibration = Calibration()
        self._speculative_tokens = self._speculative_s = 0.0
        self._draft_steps.clear()

    def calibration(self, rule: object) -> Calibration:
        """The drafter's calibration under an acceptance rule.

        The `MAX_RULES` rules that were asked for last are remembered.

        Args:
            rule: anything hashable that tells rules apart.
        """
        known = self._calibrations.pop(rule) if rule in self._calibrations else Calibration()
        self._last_calibration = self._calibrations[rule] = known
        if len(self._calibrations) > MAX_RULES:
            # Sessions that use the calibration of the rule that was asked for longest ago keep it.
            del self._calibrations[next(iter(self._calibrations))]
        return known

    # --- expectations -----------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether passes of both models were measured."""
        return self.verify.is_known and self.draft_alone.is_known

    def draft_s(self, width: int, *, beside_target: bool) -> float:
        """Seconds of a draft step over `width` tokens, while the target works or while it waits."""
        alone_s = self.draft_alone(width)
        return alone_s * self.draft_slowdown.value if beside_target and self.draft_slowdown.is_known else alone_s

    @property
    def plain_rate(self) -> float:
        """Tokens per second without a drafter."""
        seconds = self.plain_decode_s.value if self.plain_decode_s.is_known else self.verify(1)
        return 1.0 / seconds if seconds > 0 else 0.0

    @property
    def speculative_rate(self) -> float:
        """Tokens per second, recently, while speculating; 0 before the first round."""
        return self._speculative_tokens / self._speculative_s if self._speculative_s > 0 else 0.0

    @property
    def rate(self) -> float:
        """R: what a second is worth, in tokens. At least the plain rate, since plain decoding is always possible."""
        return max(self.plain_rate, self.speculative_rate)

    @property
    def best_rate(self) -> float:
        """Tokens per second to expect of speculating or of plain decoding, whichever is faster."""
        if not self.is_known:
            return self.rate
        return max(self.rate, self.modelled_rate(self._last_calibration.mean_acceptance))

    def modelled_rate(self, acceptance: float) -> float:
        """Tokens per second of the best fixed lookahead, if each drafted token is accepted with this probability."""
        best, tokens, reach = 0.0, 1.0, 1.0
        step_s, hit_rate = self.draft_s(1, beside_target=False), self.hit_rate.value if self.hit_rate.is_known else 0.5
        hidden_step_s = self.verify.target_slowdown * self.draft_s(1, beside_target=True)
        for k in range(1, 17):
            reach *= acceptance
            tokens += reach
            verify_s = self.verify(k + 1)
            # On a miss the target waits for the drafter. On a hit it was only slowed down, unless the drafter cannot
            # keep pace at all.
            drafting_s = max(k * (hit_rate * hidden_step_s + (1.0 - hit_rate) * step_s), k * step_s - verify_s)
            best = max(best, tokens / (verify_s + drafting_s))
        return best

    def estimates(self) -> Estimates:
        """A snapshot."""
        return Estimates(
            verify_seconds=self.verify(1),
            verify_seconds_per_token=self.verify.per_token if self.verify.is_known else 0.0,
            draft_seconds=self.draft_s(1, beside_target=False),
            contention=self.contention,
            plain_seconds=self.plain_decode_s.value,
            tokens_per_second=self.speculative_rate,
            acceptance=self._last_calibration.mean_acceptance,
        )

    @property
    def contention(self) -> float:
        """κ: seconds by which the target is delayed for each second that a draft step takes when it runs alone."""
        return self.verify.target_slowdown * (self.draft_slowdown.value if self.draft_slowdown.is_known else 1.0)

    # --- passes, and the draft steps beside them --------------------------------------------------

    def _price_passes(self, until_s: float) -> None:
        """Price the passes that ended by then: every draft step beside them is known."""
        while self._unpriced_passes and self._unpriced_passes[0][2] <= until_s:
            width, began_s, ended_s = self._unpriced_passes.popleft()
            overlap_s = sum(
                max(0.0, min(ended_s, step_ended) - max(began_s, step_began))
                for step_began, step_ended in reversed(self._draft_steps)
                if step_ended > began_s
            )
            self.verify.observe(width, overlap_s, ended_s - began_s)
