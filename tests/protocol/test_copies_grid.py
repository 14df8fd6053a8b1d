"""Copies beside a draft model, with the pass times of real devices: never much slower than without, and faster where
a text repeats itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_tables import FILES, scenarios
from fixed_lookaheads import auto

from actors.drafters.drafter import DrafterSession
from runtime.simulation import scripted_models
from runtime.simulation.scenario import Scenario
from runtime.simulation.simulation import run_simulation

NUM_TOKENS = 600
# A text that says the same again and again.
PERIOD = 150


def speed(scenario: Scenario, *, copies: bool) -> float:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not copies:
            monkeypatch.setattr(DrafterSession, "copies", False)
        return run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_copies_are_nowhere_much_slower_than_none_in_a_text_that_repeats_nothing(path: Path) -> None:
    ratios = {
        (scenario.acceptance, scenario.cost_ratio): speed(scenario, copies=True) / speed(scenario, copies=False)
        for scenario in list(scenarios(path))[::2]
    }
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.98} == {}


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_copies_are_faster_in_a_text_that_repeats_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = scripted_models._draw
    # The text, and what the draft makes of it, depends on the position within the period alone.
    monkeypatch.setattr(scripted_models, "_after", lambda place, _: (place + 1) % PERIOD if place < PERIOD else 1)
    monkeypatch.setattr(
        scripted_models,
        "_draw",
        lambda place, purpose: draw((place + 1) * scripted_models._MIX & scripted_models._MASK, purpose),
    )
    ratios = {
        (scenario.acceptance, scenario.cost_ratio): speed(scenario, copies=True) / speed(scenario, copies=False)
        for scenario in list(scenarios(path))[1::2]
    }
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 1.25} == {}
