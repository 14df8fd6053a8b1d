"""`lookahead="auto"` with the pass times of real devices, whose steps and plateaus no slope describes.

Each file in `device_prices` is the JSON of `outrider doctor --report`, as it is, or one of its price tables. A table
without times of a draft model stands for several.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tables import FILES, scenarios
from fixed_lookaheads import LOOKAHEADS, auto, sequential_speed
from scenario import Scenario
from simulation import run_simulation

from actors.drafters.drafter import DrafterSession

NUM_TOKENS = 600


def speed(scenario: Scenario, *, copies: bool = True) -> float:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not copies:
            monkeypatch.setattr(DrafterSession, "copies", False)
        return run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_auto_is_near_the_best_of_plain_sequential_and_without_copies(
    path: Path,
) -> None:
    for number, scenario in enumerate(list(scenarios(path))[::4]):
        with_auto = speed(scenario)
        best = max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)
        # Less than in `test_auto_grid`, since the rules take the price of width for a line, and these have steps.
        assert with_auto >= 0.9 * max(1.0, best), scenario
        if number == 0:
            assert with_auto >= 0.98 * speed(scenario, copies=False), scenario
