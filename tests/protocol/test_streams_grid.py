"""Shared passes with `lookahead="auto"` over a grid of devices, streams and drafters, in simulated time.

They are compared with plain batches, which is what an engine without a drafter does (each pass has a token of every
stream; its speed follows from the table of times), and with the same streams in turns. The slow test shows the grid
with `pytest --log-cli-level=INFO`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cache
from statistics import geometric_mean

import attrs
import pytest
from device_tables import FILES, tables, with_more_rows
from scenario import Scenario
from simulation import simulate_streams

from protocol.open_options import MAX_BATCH

logger = logging.getLogger(__name__)

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
        return speed_of_auto(self, self.num_streams) / self.plain_speed

    @property
    def over_turns(self) -> float:
        if self.num_streams == 1:
            return 1.0
        turns = speed_of_auto(self, min(MAX_TURNS, self.num_streams), max_batch=1)
        return speed_of_auto(self, self.num_streams) / turns


def over_fixed(cell: Cell) -> float:
    """Speed of "auto" over that of the best fixed lookahead, with all streams from the beginning to the end."""
    speeds = {
        lookahead: simulate_streams(cell.scenario, cell.num_streams, num_tokens=100, lookahead=lookahead).speed
        for lookahead in ("auto", 0, 1, 2, 4)
    }
    return speeds.pop("auto") / max(speeds.values())


@cache
def speed_of_auto(cell: Cell, num_streams: int, *, max_batch: int = MAX_BATCH) -> float:
    """Tokens per T_v(1) while all streams are at work."""
    num_tokens = max(MIN_TOKENS, MIN_TOKENS_OF_ALL // num_streams)
    return simulate_streams(cell.scenario, num_streams, num_tokens=num_tokens, max_batch=max_batch).steady_speed


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


# Least speed of a cell over that of the faster of the two, and least geometric mean of it over the cells of a device.
# The lowest cells are those of short texts, which end before "auto" has learnt that their drafter is too slow.
MIN_RATIO = 0.8
MIN_MEAN_RATIO = 0.99


def test_several_streams_speculate_together_where_a_plateau_makes_it_free():
    assert Cell("m3_ultra_fp16", 8, 0.8, 0.05).over_plain >= 2.0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_shared_passes_are_not_much_slower_than_plain_batches_and_turns(device):
    found = {}
    for cell in cells(device):
        over_plain, over_turns = cell.over_plain, cell.over_turns
        logger.info("%s: over plain batches %.2f, over turns %.2f", cell, over_plain, over_turns)
        found[cell] = min(over_plain, over_turns)
    assert {cell: ratio for cell, ratio in found.items() if ratio < MIN_RATIO} == {}
    assert geometric_mean(found.values()) >= MIN_MEAN_RATIO


# Least speed over that of the best fixed lookahead, and least geometric mean of it over the cells of a device.
MIN_OVER_FIXED = 0.88
MIN_MEAN_OVER_FIXED = 0.92


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_several_streams_are_nearly_as_fast_as_with_the_best_fixed_lookahead(device):
    cells = [Cell(device, *cell) for cell in ((4, 0.5, 0.05), (4, 0.8, 0.2), (8, 0.5, 0.2), (16, 0.8, 0.05))]
    found = {cell: over_fixed(cell) for cell in cells}
    assert {cell: ratio for cell, ratio in found.items() if ratio < MIN_OVER_FIXED} == {}
    assert geometric_mean(found.values()) >= MIN_MEAN_OVER_FIXED
