"""`lookahead="auto"` over a grid of machines and drafters: never much slower than plain decoding or the best fixed
lookahead without overlap, and much faster than both where drafting beside the target is free.

The time of a fixed lookahead without overlap follows from the script alone. `sequential_speed` computes it, and is
itself compared with the real actors.

Beside machines whose times rise along a slope there are those of `device_prices`, with steps and plateaus: each file is
the JSON of `outrider doctor --report`, as it is, or one of its price tables. A table without times of a draft model
stands for several.
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

import pytest
from device_tables import FILES, scenarios
from fixed_lookaheads import LOOKAHEADS, auto, sequential_speed
from scenario import Scenario
from simulation import run_simulation

from actors.drafters.drafter import DrafterSession
from protocol.lookahead_policy import ChainPolicy

ACCEPTANCES = (0.0, 0.3, 0.6, 0.75, 0.85, 0.92)
COSTS = (0.03, 0.1, 0.2, 0.35, 1.5)
CONTENTIONS = (0.0, 0.3, 1.0)
SLOPES = (0.0, 0.06, 0.5)
NUM_TOKENS = 600


def best_sequential(acceptance: float, cost: float, slope: float) -> float:
    scenario = Scenario(acceptance, cost, verify_slope=slope)
    return max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)


def speed_of_auto(acceptance: float, cost: float, slope: float, contention: float) -> float:
    return speed(Scenario(acceptance, cost, contention=contention, verify_slope=slope))


def speed(scenario: Scenario) -> float:
    return run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed


@pytest.mark.parametrize(("acceptance", "cost", "slope", "lookahead"), [(0.6, 0.1, 0.06, 3), (0.92, 0.2, 0.5, 6)])
def test_a_fixed_lookahead_without_overlap_takes_what_the_script_says(acceptance, cost, slope, lookahead):
    scenario = Scenario(acceptance, cost, verify_slope=slope)
    result = run_simulation(
        scenario, num_tokens=200, make_policy=lambda settings, prices: ChainPolicy(lookahead, overlaps=False)
    )
    assert result.speed == pytest.approx(sequential_speed(scenario, lookahead, 200), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("slope", SLOPES)
def test_auto_is_nowhere_much_slower_than_the_better_of_plain_and_best_sequential(slope):
    # With each slope, every cost, and one acceptance and one contention with it.
    shift = SLOPES.index(slope)
    ratios = {}
    for i, cost in enumerate(COSTS):
        acceptance, contention = ACCEPTANCES[(i + 2 * shift) % 6], CONTENTIONS[(i + shift) % 3]
        speed = speed_of_auto(acceptance, cost, slope, contention)
        ratios[acceptance, cost, contention] = speed / max(1.0, best_sequential(acceptance, cost, slope))
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.97} == {}


@pytest.mark.slow
def test_where_drafting_is_free_working_ahead_pays():
    ratios = [
        speed_of_auto(acceptance, cost, slope, 0.0) / best_sequential(acceptance, cost, slope)
        for acceptance, cost, slope in ((0.85, 0.1, 0.5), (0.92, 0.2, 0.0))
    ]
    assert geometric_mean(ratios) >= 1.2


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_auto_is_near_the_best_of_plain_sequential_and_without_copies(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(scenario, speed(scenario)) for scenario in list(scenarios(path))[::4]]
    for scenario, with_auto in found:
        best = max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)
        # Less than above, since the rules take the price of width for a line, and these have steps.
        assert with_auto >= 0.9 * max(1.0, best), scenario
    monkeypatch.setattr(DrafterSession, "copies", False)
    scenario, with_copies = found[0]
    assert with_copies >= 0.98 * speed(scenario), scenario
