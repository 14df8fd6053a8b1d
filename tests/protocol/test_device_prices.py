"""`lookahead="auto"` with the pass times of real devices, whose steps and plateaus no slope describes.

Each file in `device_prices` has the figures of the check "prices" in a report of `outrider selftest`, with the fields
"device" and "source" added. A file without times of a draft model stands for several.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from device_tables import FILES, tables
from fixed_lookaheads import LOOKAHEADS, auto, sequential_speed

from runtime.simulation.scenario import Scenario
from runtime.simulation.simulation import run_simulation

NUM_TOKENS = 600
ACCEPTANCES = (0.3, 0.6, 0.9)
COST_RATIOS = (0.05, 0.2)


def scenarios(path: Path) -> Iterator[Scenario]:
    """Scenarios with the times of one file."""
    of_file = tables(path)
    target, draft = of_file["target"], of_file.get("draft", ())
    cost_ratios = (draft[0][1] / target[0][1],) if draft else COST_RATIOS
    for acceptance, cost_ratio in zip(ACCEPTANCES, itertools.cycle(cost_ratios)):
        yield Scenario(acceptance, cost_ratio, contention=0.3, draft_slope=0.1, verify_table=target, draft_table=draft)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_auto_is_not_much_slower_than_the_better_of_plain_and_best_sequential(path: Path) -> None:
    ratios = {}
    for scenario in scenarios(path):
        speed = run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed
        best = max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)
        ratios[scenario.acceptance, scenario.cost_ratio] = speed / max(1.0, best)
    # Less than in `test_auto_grid`, since the rules take the price of width for a line, and these have steps.
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.9} == {}
