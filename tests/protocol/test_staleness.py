"""Drafts of a trained drafter that are stale: it read hidden states of its own where the target had not given them yet.

Stale drafts are calibrated apart from fresh ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from scenario import Scenario
from scripted import ids, next_token, priced, simulated, spike, truthful
from simulation import run_simulation
from trained_scripts import RecordingTarget, TrainedDraft
from trees import drafted_tree, tree_of

from protocol.calibration import Calibration
from protocol.lookahead_tree import Guess
from protocol.statistics import Statistics
from protocol.trace import Span

# --- calibration ----------------------------------------------------------------------------------


def taught(acceptances: dict[int, float]) -> Calibration:
    """A calibration that has seen how often guesses of each staleness were right."""
    calibration = Calibration()
    for i in range(100):
        for staleness, acceptance in acceptances.items():
            was_right = int((i + 1) * acceptance) > int(i * acceptance)
            calibration.observe(Guess(1, 0.6, raw=0.6, staleness=staleness), was_right)
    return calibration


def test_fresh_and_stale_guesses_of_the_same_confidence_are_told_apart():
    calibration = taught({0: 0.9, 2: 0.3})
    assert calibration(None, 0.6) > 0.8
    assert calibration(None, 0.6, 2) < 0.4


def test_neighbouring_stalenesses_are_learnt_together():
    calibration = taught({2: 0.3})
    assert calibration(None, 0.6, 3) == calibration(None, 0.6, 2)
    assert calibration(None, 0.6, 1) == pytest.approx(0.6, abs=0.02)
    assert calibration(None, 0.6, 1000) == calibration(None, 0.6, 8)


def test_a_snapshot_stays_as_it_was():
    calibration = taught({0: 0.9, 2: 0.9})
    snapshot = calibration.snapshot()
    before = [snapshot(None, 0.6, staleness) for staleness in (0, 2)]
    for _ in range(50):
        calibration.observe(Guess(1, 0.6, raw=0.6, staleness=2), False)
        calibration.observe(Guess(1, 0.6, raw=0.6), False)
    assert [snapshot(None, 0.6, staleness) for staleness in (0, 2)] == before


# --- the tree -------------------------------------------------------------------------------------


def test_what_was_drafted_ahead_becomes_stale_once_the_target_has_committed_what_came_before():
    tree = drafted_tree(*(Guess(token, 0.9, staleness=token) for token in range(5)))
    assert [tree.is_stale(node) for node in tree.chain()] == [False] * 5
    tree.advance([0, 1])
    assert [tree.is_stale(node) for node in tree.chain()] == [True] * 3
    # What is drafted after that has read hidden states of its own for the three alone.
    tree.expand(tree.chain()[-1], Guess(9, 0.5, staleness=3))
    assert [tree.is_stale(node) for node in tree.chain()] == [True] * 3 + [False]


def test_a_draft_models_nodes_are_never_stale():
    tree = tree_of(((0, 0.9), (1, 0.9), (2, 0.9)))
    tree.advance([0])
    assert [tree.is_stale(node) for node in tree.chain()] == [False] * 2


# --- in simulated time ----------------------------------------------------------------------------

NUM_TOKENS = 160


def scenario_of(cost: float, stale: float, **changes: Any) -> Scenario:
    return Scenario(0.85, cost, stale_acceptance=stale, **changes)


def test_staleness_costs_acceptance_and_speed():
    speeds = []
    for stale in (0.85, 0.1):
        run = run_simulation(scenario_of(0.1, stale), num_tokens=NUM_TOKENS)
        speeds.append(run.speed)
        fresh, of_stale = run.statistics.fresh_acceptance, run.statistics.stale_acceptance
        if stale < 0.85:
            assert of_stale < fresh - 0.1
    assert speeds[0] > 1.2 * speeds[1]


# --- in a trace -----------------------------------------------------------------------------------


def right_while_fresh(history: Any, staleness: int) -> Any:
    return spike((next_token(history) + (staleness > 5)) % 64)


async def text_and_drafts(**settings: Any) -> tuple[Statistics, list[Span], list[Span], list[int]]:
    price = priced(prefill=4.0, draft=2.0, verify=32.0)
    async with simulated(RecordingTarget(truthful), TrainedDraft(right_while_fresh), price=price) as simulation:
        completion = await simulation.runtime.generate([5, 6, 7, 8, 9], max_tokens=60, **settings)
    return (
        completion.statistics,
        simulation.spans("draft", "draft"),
        simulation.spans("target", "verify"),
        ids(completion.tokens),
    )


@pytest.mark.parametrize("lookahead", [2, 4, "auto"])
async def test_a_trained_drafter_drafts_inside_the_targets_passes(lookahead: Any, autojump_clock: Any) -> None:
    statistics, drafts, verifies, text = await text_and_drafts(lookahead=lookahead)
    assert text == [next_token([5, 6, 7, 8, 9, *text[:i]]) for i in range(60)]
    inside = [d for d in drafts if any(v.began <= d.began and d.ended <= v.ended for v in verifies)]
    assert len(inside) > 10
    assert statistics.lookahead_hits > 0
    assert statistics.rejected > 0 or lookahead == 2
    assert statistics.draft_failures == 0
