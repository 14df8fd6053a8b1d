"""The price of a forward pass by its rows: a table that rises, since no line fits a device with steps and plateaus.

A row is one token of one text; a pass over three tokens of each of four texts computes twelve rows. The table has an
entry for each number of rows that was seen, relative to a level that follows the pace of the machine. Entries are drawn
towards a line that is fitted to the same passes, the more so the noisier they are beside it (the shrinkage of James and
Stein), and neighbours that would fall are pooled (isotonic regression by pooling adjacent violators). Passes whose
times repeat exactly stay as measured. Between entries the price is interpolated, and beyond them it rises as the line.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import mul

import attrs

# What is assumed before anything was measured: the cost of one more row as a share of the first pass's time, and how
# far it may be from that, as a variance.
PRIOR_SLOPE, PRIOR_SLOPE_VARIANCE = 0.1, 0.1
# Likewise the relative variance of a pass's time, and the target's slowdown, each with its weight in observations.
PRIOR_NOISE, PRIOR_NOISE_WEIGHT = 0.01, 1.0
PRIOR_SLOWDOWN, PRIOR_SLOWDOWN_WEIGHT = 0.1, 0.1
# A measurement counts for at most this many times what was expected: the machine may have done something else.
MAX_SURPRISE = 3.0

# Passes with up to so many rows have an entry each; beyond, entries are a constant factor apart.
MAX_EXACT_ROWS, ENTRY_FACTOR = 16, 1.15
# Passes after which an average has forgotten all but 1/e: an entry's, of passes of that entry; the level; the slowdown.
ENTRY_MEMORY, LEVEL_MEMORY, SLOWDOWN_MEMORY = 20.0, 20.0, 60.0
# Evidence about the slowdown counts half where the overlap differs from its mean by this share of the pass.
TELLING_SHARE = 0.1
UNSEEN_MEMORY = 500.0  # passes of other entries after which an entry's weight has fallen to 1/e
MIN_FIRST_S = 1e-9  # the first pass sets the unit of the others, so it must have taken a time that a clock can tell
MAX_LINE_WEIGHT = 50.0  # how many observations the line stands for in an entry, at most


@attrs.define
class _Entry:
    """What was seen of passes with about the same rows: means, with times in units of the level."""

    rows: float
    time: float
    overlap: float
    weight: float = 1.0  # in observations

    def observe(self, rows: int, time: float, overlap: float) -> None:
        self.weight = min(ENTRY_MEMORY, self.weight + 1.0)
        self.rows += (rows - self.rows) / self.weight
        self.time += (time - self.time) / self.weight
        self.overlap += (overlap - self.overlap) / self.weight


@attrs.frozen
class _Curve:
    """The table as it is read: prices that rise, and what holds beyond them."""

    rows: tuple[float, ...] = (1.0,)  # of the entries, rising
    seconds: tuple[float, ...] = (0.0,)  # likewise
    slope: float = 0.0  # seconds of each further row beyond the last entry, and of each one less before the first
    slowdown: float = PRIOR_SLOWDOWN  # see `PassPrice.target_slowdown`

    def __call__(self, rows: float) -> float:
        right = bisect_right(self.rows, rows)
        if right == 0:
            # As for the slope: no pass takes less than its share of a wider one.
            share_s = self.seconds[0] * rows / self.rows[0]
            return max(share_s, self.seconds[0] - self.slope * (self.rows[0] - rows))
        last_rows, last_s = self.rows[right - 1], self.seconds[right - 1]
        if right == len(self.rows):
            return last_s + self.slope * (rows - last_rows)
        share = (rows - last_rows) / (self.rows[right] - last_rows)
        return last_s + share * (self.seconds[right] - last_s)


@attrs.define
class PassPrice:
    """Seconds of a forward pass, by the rows that it computes and by the time a drafter works beside it."""

    _unit: float = attrs.field(default=0.0, init=False)  # time of the first pass
    _level: float = attrs.field(default=1.0, init=False)  # present pace of the machine, relative to that pass
    _entries: dict[int, _Entry] = attrs.field(factory=dict, init=False)  # rising
    # Of passes around the means of their entries: sums of overlap² and overlap · time; relative variance of the time.
    _overlap_squared: float = attrs.field(default=0.0, init=False)
    _overlap_time: float = attrs.field(default=0.0, init=False)
    _noise: float = attrs.field(default=PRIOR_NOISE, init=False)
    _noise_weight: float = attrs.field(default=PRIOR_NOISE_WEIGHT, init=False)
    _num_passes: int = attrs.field(default=0, init=False)
    # Computed when a pass is added and assigned as one value, so that other threads can read it.
    _curve: _Curve = attrs.field(factory=_Curve, init=False)

    def observe(self, rows: int, overlap_s: float, seconds: float) -> None:
        """Add the measurement of a pass; for `overlap_s` of its seconds, a drafter worked beside it."""
        self._num_passes += 1
        if self._unit == 0.0:
            if seconds < MIN_FIRST_S:  # as of a drafter without a model
                return
            self._unit = seconds
        elif self._num_passes > 5:
            seconds = min(seconds, MAX_SURPRISE * self(rows, overlap_s))
        self._observe_entry(rows, seconds / self._level, overlap_s / self._level)
        self._curve = self._fitted()

    @property
    def is_known(self) -> bool:
        """Whether a pass was measured."""
        return self._num_passes > 0

    @property
    def target_slowdown(self) -> float:
        """Seconds by which a pass takes longer for each second that a drafter works beside it, in [0, 0.9]."""
        return self._curve.slowdown

    def __call__(self, rows: float, overlap_s: float = 0.0) -> float:
        """Seconds, >= 0, of a pass with a drafter beside it for `overlap_s`; 0 before any was measured."""
        curve = self._curve
        return curve(rows) + curve.slowdown * overlap_s if self._num_passes else 0.0

    def per_row(self, rows: float) -> float:
        """Seconds that each row after the first costs, on average, in a pass with this many, >= 1; >= 0."""
        return (self(rows) - self(1)) / max(1.0, rows - 1.0)

    def table(self) -> tuple[tuple[int, float], ...]:
        """(rows, seconds) of each entry, rising; empty before the first pass."""
        curve = self._curve
        if not self._entries:
            return ()
        by_rows = {round(rows): seconds for rows, seconds in zip(curve.rows, curve.seconds, strict=True)}
        return tuple(sorted(by_rows.items()))

    def _observe_entry(self, rows: int, time: float, overlap: float) -> None:
        for entry in self._entries.values():
            entry.weight *= 1.0 - 1.0 / UNSEEN_MEMORY
        key = _entry_of(rows)
        if key not in self._entries:
            self._entries = dict(sorted([*self._entries.items(), (key, _Entry(rows, time, overlap))]))
            return
        entry = self._entries[key]
        more_overlap, more_time = overlap - entry.overlap, time - entry.time
        # Old evidence fades only as new evidence arrives. While the drafter rests, hardly any does.
        told = more_overlap**2 / max(more_overlap**2 + (TELLING_SHARE * time) ** 2, 1e-12)
        keep, share = 1.0 - told / SLOWDOWN_MEMORY, entry.weight / (entry.weight + 1.0)
        self._overlap_squared = keep * self._overlap_squared + share * more_overlap**2
        self._overlap_time = keep * self._overlap_time + share * more_overlap * more_time
        # The part of the time that the drafter's work beside the pass explains is expected.
        expected = entry.time + self._slowdown() * more_overlap
        entry.observe(rows, time, overlap)
        if expected > 0.0:
            surprise = min(time / expected, MAX_SURPRISE) - 1.0
            self._noise_weight = min(ENTRY_MEMORY, self._noise_weight + 1.0)
            self._noise += (min(1.0, surprise**2) - self._noise) / self._noise_weight
            self._level *= 1.0 + surprise / LEVEL_MEMORY

    def _slowdown(self) -> float:
        prior_weight = PRIOR_SLOWDOWN_WEIGHT * self._unit**2
        slowdown = (self._overlap_time + prior_weight * PRIOR_SLOWDOWN) / (self._overlap_squared + prior_weight)
        return min(0.9, max(0.0, slowdown))

    def _fitted(self) -> _Curve:
        """The table with its entries drawn towards a line, and pooled where they would fall."""
        slowdown, level, noise = self._slowdown(), self._level, self._noise
        entries = self._entries.values()
        rows, weights = [entry.rows for entry in entries], [entry.weight for entry in entries]
        times = [max(0.0, entry.time - slowdown * entry.overlap) for entry in entries]
        # The line: a weighted regression on the rows. The less noise, the weaker the prior of its slope.
        total = sum(weights)
        mean_rows, mean_time = sum(map(mul, weights, rows)) / total, sum(map(mul, weights, times)) / total
        square = max(noise / PRIOR_SLOPE_VARIANCE, 1e-9)
        product = square * PRIOR_SLOPE * self._unit
        for w, row, time in zip(weights, rows, times, strict=True):
            distance = w * (row - mean_rows)
            product += distance * (time - mean_time)
            square += distance * (row - mean_rows)
        # At most as steep as through the origin: no pass takes less than its share of a wider one.
        slope = min(max(0.0, product / square), mean_time / mean_rows)
        line = [mean_time + slope * (row - mean_rows) for row in rows]
        # The variance of the entries around the line, relative to the line, less what noise explains.
        fitted = list(zip(weights, times, line, strict=True))
        misfit = sum(((time - fit) / fit) ** 2 - noise / w for w, time, fit in fitted if fit > 0.0)
        line_weight = min(MAX_LINE_WEIGHT, noise / max(misfit / len(rows), 1e-9))
        drawn = [(w * time + line_weight * fit) / (w + line_weight) for w, time, fit in fitted]
        pooled = _pooled(drawn, [w + line_weight for w in weights])
        return _Curve(tuple(rows), tuple([level * time for time in pooled]), level * slope, slowdown)


def _entry_of(rows: int) -> int:
    """Which entry a pass belongs to: its rows, rounded down to the nearest of them."""
    if rows <= MAX_EXACT_ROWS:
        return rows
    entry = MAX_EXACT_ROWS + 1
    while (following := int(entry * ENTRY_FACTOR)) <= rows:
        entry = following
    return entry


def _pooled(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The rising sequence that is closest to some values, by weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # (mean, weight, how many values)
    for value, weight in zip(values, weights, strict=True):
        mean, total, length = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            last_mean, last_weight, last_length = blocks.pop()
            mean = (mean * total + last_mean * last_weight) / (total + last_weight)
            total, length = total + last_weight, length + last_length
        blocks.append((mean, total, length))
    return [mean for mean, _, length in blocks for _ in range(length)]
