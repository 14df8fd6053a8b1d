"""`lookahead="auto"` with the pass times of real devices, whose steps and plateaus no slope describes.

Each file in `device_prices` is the JSON of `outrider selftest --report`, as it is, or one of its price tables. A table
without times of a draft model stands for several.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tables import FILES, scenarios
from fixed_lookaheads import LOOKAHEADS, auto, sequential_speed

from runtime.simulation.simulation import run_simulation

NUM_TOKENS = 600


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_auto_is_not_much_slower_than_the_better_of_plain_and_best_sequential(path: Path) -> None:
    ratios = {}
    for number, scenario in enumerate(scenarios(path)):
        speed = run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed
        best = max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)
        ratios[number, scenario.acceptance, scenario.cost_ratio] = speed / max(1.0, best)
    # Less than in `test_auto_grid`, since the rules take the price of width for a line, and these have steps.
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.9} == {}
