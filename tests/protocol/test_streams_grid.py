"""Shared passes with `lookahead="auto"` over a grid of devices, streams and drafters, in simulated time.

They are compared with plain batches, which is what an engine without a drafter does (each pass has a token of every
stream; its speed follows from the table of times), and with the same streams in turns. The slow test shows the grid
with `pytest --log-cli-level=INFO`.
"""

from __future__ import annotations

import logging

import pytest
from streams_grid import DEVICES, Cell, cells, geometric_mean
from sweeps import sweep

logger = logging.getLogger(__name__)

# Least speed of a cell over that of the faster of the two, and least geometric mean of it over the cells of a device.
# The lowest cells are those of short texts, which end before "auto" has learnt that their drafter is too slow.
MIN_RATIO = 0.8
MIN_MEAN_RATIO = 0.99

# Cells that differ in everything, for every run of the tests.
SAMPLE = [Cell("cpu_fp32_rows", 2, 0.0, 0.2), Cell("m4_pro_4bit", 4, 0.95, 0.2)]


@sweep("cell", SAMPLE)
def test_shared_passes_are_not_much_slower_than_plain_batches_and_turns_in_a_sample(cell):
    assert cell.ratios.over_better >= MIN_RATIO


def test_several_streams_speculate_together_where_a_plateau_makes_it_free():
    assert Cell("m3_ultra_fp16", 8, 0.8, 0.05).over_plain >= 2.0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_shared_passes_are_not_much_slower_than_plain_batches_and_turns(device):
    found = {}
    for cell in cells(device):
        ratios = cell.ratios
        logger.info("%s: over plain batches %.2f, over turns %.2f", cell, ratios.over_plain, ratios.over_turns)
        found[cell] = ratios.over_better
    assert {cell: ratio for cell, ratio in found.items() if ratio < MIN_RATIO} == {}
    assert geometric_mean(found.values()) >= MIN_MEAN_RATIO
