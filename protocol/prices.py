"""What a forward pass costs, and what speculating brings, measured as it goes by.

T_v(m), the time to verify m tokens, is affine in m; T_d is a draft step; κ is the part of a draft step that it costs
the target when both run; R is the rate of committed tokens. Machines, caches and neighbours change, so all of them
are averages in which the past fades.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from protocol.calibration import Calibration


@attrs.define
class WidthPrice:
    """Seconds of a forward pass as an affine function of its width, fitted to the recent ones.

    An exponentially weighted least-squares line. Machines, caches and neighbours change, so what was measured
    `memory` passes ago counts for 1/e.

    Attributes:
        memory: in passes, > 1.
    """

    memory: float = 50.0
    _weight: float = attrs.field(default=0.0, init=False)
    _width: float = attrs.field(default=0.0, init=False)
    _seconds: float = attrs.field(default=0.0, init=False)
    _width_squared: float = attrs.field(default=0.0, init=False)
    _product: float = attrs.field(default=0.0, init=False)
    # Mean width, mean seconds, seconds per token; put in place at once, since other threads read it.
    _line: tuple[float, float, float] = attrs.field(default=(0.0, 0.0, 0.0), init=False)

    def observe(self, width: int, seconds: float) -> None:
        """Take note of a pass of `width` tokens."""
        keep = 1.0 - 1.0 / self.memory
        self._weight = keep * self._weight + 1.0
        share = 1.0 / self._weight
        self._width += share * (width - self._width)
        self._seconds += share * (seconds - self._seconds)
        self._width_squared += share * (width * width - self._width_squared)
        self._product += share * (width * seconds - self._product)
        spread = self._width_squared - self._width**2
        # 0 until passes of two widths were seen.
        slope = max(0.0, (self._product - self._width * self._seconds) / spread) if spread > 1e-9 else 0.0
        self._line = self._width, self._seconds, slope

    @property
    def is_known(self) -> bool:
        """Whether a pass was seen."""
        return self._weight > 0

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs, >= 0; 0 until passes of two widths were seen."""
        return self._line[2]

    def __call__(self, width: int) -> float:
        """Seconds that a pass of `width` tokens is expected to take, >= 0; 0 before the first."""
        mean_width, mean_seconds, slope = self._line
        return max(0.0, mean_seconds + slope * (width - mean_width))


# What is believed of passes before they were seen, as fractions of the time of the first, and for how many
# observations' worth.
PRIOR_SLOPE, SLOPE_WEIGHT = 0.1, 1.0
PRIOR_DELAY, DELAY_WEIGHT = 0.1, 0.1
# One pass in which the machine did something else shall not bend the line.
MOST_SURPRISE = 3.0


def _solved(sums: Sequence[float]) -> tuple[float, float, float]:
    """Of a `ContendedPrice`: the seconds of a pass of one token and of each further token, in units, and the delay."""
    n, x, z, xx, xz, zz, y, xy, zy = sums
    xx, xy = xx + SLOPE_WEIGHT, xy + SLOPE_WEIGHT * PRIOR_SLOPE
    zz, zy = zz + DELAY_WEIGHT, zy + DELAY_WEIGHT * PRIOR_DELAY
    n = max(n, 1e-9)
    # Eliminate the constant, then two unknowns are left.
    # What was believed beforehand is a lower bound, but for rounding.
    xx, xz, zz = max(SLOPE_WEIGHT, xx - x * x / n), xz - x * z / n, max(DELAY_WEIGHT, zz - z * z / n)
    xy, zy = xy - x * y / n, zy - z * y / n
    determinant = max(SLOPE_WEIGHT * DELAY_WEIGHT, xx * zz - xz * xz)
    slope = max(0.0, (xy * zz - zy * xz) / determinant)
    delay = min(0.9, max(0.0, (zy - xz * slope) / zz))
    slope = max(0.0, (xy - xz * delay) / xx)
    return (y - slope * x - delay * z) / n, slope, delay


@attrs.define
class ContendedPrice:
    """Seconds of a target's pass: affine in its width and in the time for which a drafter worked beside it.

    Exponentially weighted least squares over (1, width - 1, overlap), drawn a little towards what is likely, so that
    what cannot be told apart (a width that never changes) stays where it was.

    Attributes:
        memory: in passes, > 1.
    """

    memory: float = 60.0
    _sums: list[float] = attrs.field(factory=lambda: [0.0] * 9, init=False)
    _unit: float = attrs.field(default=0.0, init=False)
    # Solved as soon as a pass was seen, so that reading, which other threads do too, writes nothing.
    _solution: tuple[float, float, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._solution = _solved(self._sums)

    def observe(self, width: int, overlap: float, seconds: float) -> None:
        """Take note of a pass of `width` tokens, for `overlap` of its `seconds` beside a busy drafter."""
        if self._unit == 0.0:
            self._unit = seconds
            if seconds <= 0.0:
                return
        elif self._sums[0] > 4.0:
            seconds = min(seconds, MOST_SURPRISE * self(width, overlap))
        keep = 1.0 - 1.0 / self.memory
        x, z, y = width - 1.0, overlap / self._unit, seconds / self._unit
        for i, term in enumerate((1.0, x, z, x * x, x * z, z * z, y, x * y, z * y)):
            self._sums[i] = keep * self._sums[i] + term
        self._solution = _solved(self._sums)

    @property
    def is_known(self) -> bool:
        """Whether a pass was seen."""
        return self._unit > 0.0

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs, >= 0."""
        return self._solution[1] * self._unit

    @property
    def delay(self) -> float:
        """Seconds by which a pass is late for each second that a drafter works beside it, in [0, 0.9]."""
        return self._solution[2]

    def __call__(self, width: int, overlap: float = 0.0) -> float:
        """Seconds that a pass is expected to take, >= 0; 0 before the first was seen."""
        base, slope, delay = self._solution
        return max(0.0, (base + slope * (width - 1)) * self._unit + delay * overlap)


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
        """Take note of a value."""
        self._weight = min(self.memory, self._weight + 1.0)
        self.value += (value - self.value) / self._weight

    @property
    def is_known(self) -> bool:
        """Whether a value was seen."""
        return self._weight > 0


@attrs.frozen
class Estimates:
    """What a runtime has measured of its two models; a snapshot, 0 where nothing was measured yet.

    Attributes:
        verify_seconds: T_v(1), a verify pass over one token with nothing beside it.
        verify_seconds_per_token: what each further token adds to it.
        draft_seconds: T_d, a draft step while the target waits.
        contention: κ, the part of a draft step's time that it costs the target when both run; about in [0, 1].
        plain_seconds: a token decoded without a drafter.
        tokens_per_second: R, of late, while speculating.
        acceptance: probability, of late, that a drafted token stands, in [0, 1].
    """

    verify_seconds: float
    verify_seconds_per_token: float
    draft_seconds: float
    contention: float
    plain_seconds: float
    tokens_per_second: float
    acceptance: float


# Rules for which what was learnt of the drafter is remembered. Clients choose temperatures as they like, and each
# makes a rule.
MOST_RULES = 16
# Rounds over which the rate of speculating is averaged.
RATE_MEMORY = 40.0


@attrs.define
class Prices:
    """All that a runtime measures of its models, for the rules of `protocol.lookahead_policy`.

    It outlives the streams: what one has learnt, the next begins with.

    Attributes:
        verify: a target's pass.
        draft_alone: a draft step by width, while the target waits.
        slowdown: by what factor it takes longer while the target works.
        plain: seconds of a token decoded without a drafter, the way through the event loop included.
        round_overhead: seconds of a speculative round for which the target neither worked nor waited for a draft.
        hits: how often, of late, a verdict's text had been drafted for, in [0, 1].
    """

    verify: ContendedPrice = attrs.field(factory=ContendedPrice)
    draft_alone: WidthPrice = attrs.field(factory=WidthPrice)
    slowdown: Mean = attrs.field(factory=lambda: Mean(memory=50.0))
    plain: Mean = attrs.field(factory=lambda: Mean(memory=50.0))
    round_overhead: Mean = attrs.field(factory=lambda: Mean(memory=30.0))
    hits: Mean = attrs.field(factory=lambda: Mean(memory=30.0))
    _calibrations: dict[object, Calibration] = attrs.field(factory=dict)
    _last: Calibration = attrs.field(factory=Calibration)
    _tokens: float = 0.0
    _seconds: float = 0.0
    _drafts: deque[tuple[float, float]] = attrs.field(factory=lambda: deque(maxlen=256))
    _unpriced: deque[tuple[int, float, float]] = attrs.field(factory=deque)

    # --- what was seen ----------------------------------------------------------------------------

    def drafted(self, width: int, began: float, ended: float, *, beside: bool) -> None:
        """Take note of a draft step, and of whether the target worked meanwhile."""
        seconds = ended - began
        if not beside or not self.draft_alone.is_known:
            self.draft_alone.observe(width, seconds)
        elif (expected := self.draft_alone(width)) > 0:
            self.slowdown.observe(min(seconds / expected, MOST_SURPRISE))
        self._drafts.append((began, ended))
        self._price_passes(until=ended)

    def verified(self, width: int, began: float, ended: float) -> None:
        """Take note of a verify pass."""
        self._price_passes(until=ended)
        # What was drafted beside its end is known once that step has ended.
        self._unpriced.append((width, began, ended))

    def round_over(self, num_tokens: int, seconds: float) -> None:
        """Take note of a speculative round: what it committed, and the time from the last verdict to its own."""
        keep = 1.0 - 1.0 / RATE_MEMORY
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds

    def speculate_afresh(self) -> None:
        """Forget how speculating went, but for the model of it."""
        rounds = 3.0
        self._seconds = rounds * self.verify(2)
        self._tokens = self._seconds * self.modelled_rate(self._last.mean)

    def forget_drafter(self) -> None:
        """Another drafter comes: forget what the last one cost, and how often it was right."""
        self.draft_alone = WidthPrice()
        self.slowdown = Mean(memory=50.0)
        self.hits = Mean(memory=30.0)
        self._calibrations.clear()
        self._last = Calibration()
        self._tokens = self._seconds = 0.0
        self._drafts.clear()

    def calibration(self, rule: object) -> Calibration:
        """How far the drafter is to be believed under a rule (anything that tells rules apart).

        The rules that were asked for last are remembered, `MOST_RULES` of them.
        """
        self._last = self._calibrations.pop(rule) if rule in self._calibrations else Calibration()
        self._calibrations[rule] = self._last
        if len(self._calibrations) > MOST_RULES:
            # Sessions at work under the one that was asked for longest ago go on with theirs.
            del self._calibrations[next(iter(self._calibrations))]
        return self._last

    # --- what is expected -------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether both models' passes were seen."""
        return self.verify.is_known and self.draft_alone.is_known

    def draft(self, width: int, *, beside: bool) -> float:
        """Seconds of a draft step over `width` tokens."""
        alone = self.draft_alone(width)
        return alone * self.slowdown.value if beside and self.slowdown.is_known else alone

    @property
    def plain_rate(self) -> float:
        """Tokens per second without a drafter."""
        seconds = self.plain.value if self.plain.is_known else self.verify(1) + self.round_overhead.value
        return 1.0 / seconds if seconds > 0 else 0.0

    @property
    def speculative_rate(self) -> float:
        """Tokens per second, of late, while speculating; 0 before the first round."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def rate(self) -> float:
        """R: what a second is worth, in tokens; plain decoding can always be had."""
        return max(self.plain_rate, self.speculative_rate)

    @property
    def best_rate(self) -> float:
        """Tokens per second to be expected of the better of speculating and plain decoding."""
        return max(self.rate, self.modelled_rate(self._last.mean)) if self.is_known else self.rate

    def modelled_rate(self, acceptance: float) -> float:
        """Tokens per second of the best fixed lookahead, were each drafted token to stand with this probability."""
        best, tokens, reach = 0.0, 1.0, 1.0
        step, hits = self.draft(1, beside=False), self.hits.value if self.hits.is_known else 0.5
        delayed = self.verify.delay * self.draft(1, beside=True)
        for k in range(1, 17):
            reach *= acceptance
            tokens += reach
            verify = self.verify(k + 1)
            # On a miss the target waits for the drafter; on a hit it was only delayed, unless the drafter cannot
            # keep pace at all.
            drafting = max(k * (hits * delayed + (1.0 - hits) * step), k * step - verify)
            best = max(best, tokens / (verify + drafting + self.round_overhead.value))
        return best

    def estimates(self) -> Estimates:
        """A snapshot."""
        return Estimates(
            verify_seconds=self.verify(1),
            verify_seconds_per_token=self.verify.per_token if self.verify.is_known else 0.0,
            draft_seconds=self.draft(1, beside=False),
            contention=self.contention,
            plain_seconds=self.plain.value,
            tokens_per_second=self.speculative_rate,
            acceptance=self._last.mean,
        )

    @property
    def contention(self) -> float:
        """κ: by how much of a draft step's own time the target is later for it."""
        return self.verify.delay * (self.slowdown.value if self.slowdown.is_known else 1.0)

    # --- passes and what was drafted beside them ----------------------------------------------------

    def _price_passes(self, until: float) -> None:
        """Price the passes of which it is known by now what was drafted beside them."""
        while self._unpriced and self._unpriced[0][2] <= until:
            width, began, ended = self._unpriced.popleft()
            overlap = sum(max(0.0, min(ended, e) - max(began, b)) for b, e in reversed(self._drafts) if e > began)
            self.verify.observe(width, overlap, ended - began)
