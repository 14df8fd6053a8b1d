"""`lookahead="auto"` over a grid of machines and drafters: never much slower than plain decoding or the best fixed
lookahead without overlap, and much faster than both where drafting beside the target is free.

The time of a fixed lookahead without overlap follows from the script alone. `sequential_speed` computes it, and is
itself compared with the real actors.
"""

from __future__ import annotations

import math
from functools import cache

import pytest

from protocol.lookahead_policy import AutoPolicy, ChainPolicy
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_models import PROMPT, ScriptedDraft, ScriptedTarget
from runtime.simulation.simulation import run_simulation

ACCEPTANCES = (0.0, 0.3, 0.6, 0.75, 0.85, 0.92)
COSTS = (0.03, 0.1, 0.2, 0.35, 1.5)
CONTENTIONS = (0.0, 0.3, 1.0)
SLOPES = (0.0, 0.06, 0.5)
LOOKAHEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
NUM_TOKENS = 1000


def sequential_speed(scenario: Scenario, lookahead: int, num_tokens: int) -> float:
    """Tokens per T_v(1) when drafting `lookahead` tokens, then verifying them, then drafting again."""
    prices = {"draft": scenario.draft_seconds, "verify": scenario.verify_seconds}
    return num_tokens / sum(prices[kind](width) for kind, width in passes(scenario.acceptance, lookahead, num_tokens))


@cache
def passes(acceptance: float, lookahead: int, num_tokens: int) -> list[tuple[str, int]]:
    """The passes of the two models: (model, number of tokens that it reads). Costs do not change these."""
    scenario = Scenario(acceptance, cost_ratio=1.0)
    target = ScriptedTarget(scenario).open_sequence(beside_another=True)
    draft = ScriptedDraft(scenario).open_sequence(beside_another=True)
    text, num_read, found = list(PROMPT), 0, []
    target.feed(PROMPT, 0)
    while len(text) < len(PROMPT) + num_tokens:
        drafted: list[int] = []
        for _ in range(min(lookahead, len(PROMPT) + num_tokens - len(text) - 1)):
            unread = tuple((text + drafted)[num_read:])
            drafted.append(choice(draft, unread))
            found.append(("draft", len(unread)))
            num_read += len(unread)
        found.append(("verify", 1 + len(drafted)))
        agreed = len(text)
        for token in (*drafted, None):
            text.append(choice(target, ()))
            target.feed(text[-1:], 0)
            if text[-1] != token:
                break
            agreed += 1
        num_read = min(num_read, agreed)
        draft.rewind(num_read)
    return found


def choice(sequence, tokens) -> int:
    """The next token of a scripted model after tokens that it has not read."""
    if tokens:
        sequence.feed(tokens, 0)
    (row,) = sequence._rows(sequence._histories, 1).tolist()
    return row.index(max(row))


@cache
def best_sequential(acceptance: float, cost: float, slope: float) -> float:
    scenario = Scenario(acceptance, cost, verify_slope=slope)
    return max(sequential_speed(scenario, lookahead, NUM_TOKENS) for lookahead in LOOKAHEADS)


def auto(settings, prices) -> AutoPolicy:
    return AutoPolicy(prices, prices.calibration("greedy"))


@cache
def speed_of_auto(acceptance: float, cost: float, slope: float, contention: float) -> float:
    scenario = Scenario(acceptance, cost, contention=contention, verify_slope=slope)
    return run_simulation(scenario, num_tokens=NUM_TOKENS, make_policy=auto).speed


@pytest.mark.parametrize(("acceptance", "cost", "slope", "lookahead"), [(0.6, 0.1, 0.06, 3), (0.92, 0.2, 0.5, 6)])
def test_a_fixed_lookahead_without_overlap_takes_what_the_script_says(acceptance, cost, slope, lookahead):
    scenario = Scenario(acceptance, cost, verify_slope=slope)
    result = run_simulation(
        scenario, num_tokens=200, make_policy=lambda settings, prices: ChainPolicy(lookahead, overlaps=False)
    )
    assert result.speed == pytest.approx(sequential_speed(scenario, lookahead, 200), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("contention", CONTENTIONS)
@pytest.mark.parametrize("slope", SLOPES)
def test_auto_is_nowhere_much_slower_than_the_better_of_plain_and_best_sequential(slope, contention):
    ratios = {
        (acceptance, cost): speed_of_auto(acceptance, cost, slope, contention)
        / max(1.0, best_sequential(acceptance, cost, slope))
        for i, acceptance in enumerate(ACCEPTANCES)
        for j, cost in enumerate(COSTS)
        # Every other cell, as on a chess board, since neighbours are similar.
        if (i + j + SLOPES.index(slope) + CONTENTIONS.index(contention)) % 2 == 0
    }
    assert {cell: ratio for cell, ratio in ratios.items() if ratio < 0.97} == {}


@pytest.mark.slow
def test_where_drafting_is_free_working_ahead_pays():
    ratios = [
        speed_of_auto(acceptance, cost, slope, 0.0) / best_sequential(acceptance, cost, slope)
        for i, acceptance in enumerate((0.75, 0.85, 0.92))
        for j, cost in enumerate((0.03, 0.1, 0.2))
        for k, slope in enumerate(SLOPES)
        if (i + j + k) % 2 == 0
    ]
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) >= 1.2
