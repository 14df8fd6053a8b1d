"""Shared passes with "auto", compared with plain batches and turns, over a grid of devices, streams and drafters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import attrs
from device_tables import FILES, tables, with_more_rows
from scenario import Scenario
from simulation import simulate_streams

from protocol.open_options import MAX_BATCH

DEVICES = {path.stem: with_more_rows(tables(path)["target"]) for path in FILES}
STREAMS = (1, 2, 4, 8, 16, 32)
ACCEPTANCES = (0.0, 0.5, 0.8, 0.95)
COST_RATIOS = (0.05, 0.2, 0.5)
CONTENTION = 0.3
# So many streams in turns keep the target at work at any time, and more are no faster.
MAX_TURNS = 4
# Tokens of each stream. A few streams need longer texts: what "auto" learns at the beginning, each learns alone.
MIN_TOKENS, MIN_TOKENS_OF_ALL = 60, 240


@attrs.frozen(order=True)
class Cell:
    device: str
    num_streams: int
    acceptance: float
    cost_ratio: float

    @property
    def scenario(self) -> Scenario:
        return Scenario(
            self.acceptance, self.cost_ratio, contention=CONTENTION, draft_slope=0.1, verify_table=DEVICES[self.device]
        )

    @property
    def plain_speed(self) -> float:
        """Tokens per T_v(1) of plain batches: each pass has a token of every stream."""
        return self.num_streams / self.scenario.verify_seconds(self.num_streams)

    @property
    def over_plain(self) -> float:
        return self._speed_of_auto(self.num_streams) / self.plain_speed

    @property
    def ratios(self) -> Ratios:
        """The speeds of shared passes with "auto" over those of plain batches and of turns with "auto"."""
        shared = self._speed_of_auto(self.num_streams)
        turns = shared if self.num_streams == 1 else self._speed_of_auto(min(MAX_TURNS, self.num_streams), max_batch=1)
        return Ratios(shared / self.plain_speed, shared / turns)

    def _speed_of_auto(self, num_streams: int, *, max_batch: int = MAX_BATCH) -> float:
        """Tokens per T_v(1) while all streams are at work."""
        num_tokens = max(MIN_TOKENS, MIN_TOKENS_OF_ALL // num_streams)
        played = simulate_streams(self.scenario, num_streams, num_tokens=num_tokens, max_batch=max_batch)
        return played.steady_speed


@attrs.frozen
class Ratios:
    """The speed of shared passes with "auto" over that of two others."""

    over_plain: float
    over_turns: float

    @property
    def over_better(self) -> float:
        return min(self.over_plain, self.over_turns)


def cells(device: str) -> Iterator[Cell]:
    """One cell of a device for each number of streams, from diagonals, since neighbours are similar."""
    for i, num_streams in enumerate(STREAMS):
        drafters = [
            (acceptance, cost_ratio)
            for j, acceptance in enumerate(ACCEPTANCES)
            for k, cost_ratio in enumerate(COST_RATIOS)
            if (i + j + k) % 6 == 0
        ]
        yield Cell(device, num_streams, *drafters[list(DEVICES).index(device) % len(drafters)])


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
