"""A fixed lookahead drafts while the target verifies where that pays, in simulated time over contention."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from fixed_lookaheads import sequential_speed
from scenario import Scenario
from scripted import ScriptedModel, continuation, simulated, text_of, truthful
from scripted import priced as job_prices
from simulation import run_simulation
from sweeps import sweep

from actors.drafters.drafter import policy_by_settings
from protocol.lookahead_policy import ChainPolicy
from protocol.open_options import WORK_AHEAD, WorkAhead
from protocol.prices import TRIED_EVERY_ROUNDS, TRIED_ROUNDS, Prices
from protocol.settings import Settings

# Of the better of both ways. The others' rounds find out which that is.
LEAST = 0.97


def ratios(scenario: Scenario, lookahead: int, num_tokens: int) -> tuple[float, float]:
    """The speed over that of always working ahead, and over that of never doing so."""
    speed = run_simulation(scenario, num_tokens=num_tokens, lookahead=lookahead).speed
    always = run_simulation(
        scenario,
        num_tokens=num_tokens,
        lookahead=lookahead,
        make_policy=lambda *_: ChainPolicy(lookahead, overlaps=True),
    ).speed
    # `test_auto_grid` compares this with the real actors.
    never = sequential_speed(scenario, lookahead, num_tokens)
    return speed / always, speed / never


@pytest.mark.parametrize("contention", [0.0, 1.0])
def test_the_better_way_is_found_where_it_matters(contention: float) -> None:
    over_always, over_never = ratios(Scenario(0.8, 0.25, contention=contention), 2, 400)
    assert min(over_always, over_never) > 0.95
    if contention == 1.0:
        assert over_always > 1.2
    else:
        assert over_never > 1.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lookahead", "acceptance", "cost_ratio", "contention"),
    [
        (1, 0.8, 0.25, 1.0),
        (2, 0.5, 0.1, 0.75),
        (3, 0.8, 0.1, 0.5),
    ],
)
def test_neither_way_is_much_better(lookahead: int, acceptance: float, cost_ratio: float, contention: float) -> None:
    scenario = Scenario(acceptance, cost_ratio, contention=contention)
    assert min(ratios(scenario, lookahead, 1000)) >= LEAST


def priced(*, slowdown: float, hit_rate: float) -> Prices:
    prices = Prices()
    for _ in range(50):
        prices.observe_draft_step(1, 0.0, 0.25, beside_target=False)
        prices.hit_rate.observe(hit_rate)
    for i in range(200):
        overlap_s = (i % 3) / 4
        prices.verify.observe(1 + i % 4, overlap_s, 1.0 + 0.05 * (i % 4) + slowdown * overlap_s)
    for _ in range(TRIED_ROUNDS):
        prices.observe_round(2, 1.0)
    return prices


def test_the_price_decides_and_both_are_tried_again() -> None:
    assert Prices().works_ahead(2)  # nothing is known
    assert priced(slowdown=0.1, hit_rate=0.7).works_ahead(2)
    prices = priced(slowdown=0.9, hit_rate=0.3)
    told = []
    for _ in range(2 * TRIED_EVERY_ROUNDS):
        told.append(prices.works_ahead(2))
        prices.observe_round(2, 1.0)
    assert sum(told) == 2 * TRIED_ROUNDS


# --- what a user may choose -------------------------------------------------------------------------


@sweep("lookahead", [2, "auto"])
@sweep("work_ahead", WORK_AHEAD)
async def test_drafting_beside_a_pass_is_a_choice(lookahead: Any, work_ahead: WorkAhead, autojump_clock: Any) -> None:
    async with simulated(
        ScriptedModel(truthful),
        ScriptedModel(truthful),
        price=job_prices(draft=1.0, verify=8.0),
        make_policy=partial(policy_by_settings, work_ahead=work_ahead),
    ) as simulation:
        assert await text_of(simulation, [5, 6, 7], max_tokens=60, lookahead=lookahead) == continuation([5, 6, 7], 60)
        passes = simulation.spans("target", "verify")
        drafts = simulation.spans("draft", "draft")
    beside = [draft for draft in drafts if any(each.began <= draft.began < each.ended for each in passes)]
    assert bool(beside) is (work_ahead != "never")
    assert drafts


@pytest.mark.parametrize("contention", [0.0, 1.0])
def test_always_and_never_do_not_ask_the_prices(contention: float) -> None:
    prices = priced(slowdown=contention, hit_rate=0.9)
    assert policy_by_settings(Settings(lookahead=2), prices, "always").works_ahead is True
    assert policy_by_settings(Settings(lookahead=2), prices, "never").works_ahead is False
    assert policy_by_settings(Settings(lookahead="auto"), prices, "never").works_ahead is False
