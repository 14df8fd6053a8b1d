"""The automatic lookahead follows a change of the acceptance rate in mid-stream within about fifty rounds."""

from __future__ import annotations

import functools

import pytest
from sweeps import sweep

from runtime.simulation.scenario import Scenario
from runtime.simulation.simulation import run_simulation

GOOD, BAD = 0.9, 0.2
BAD_FROM, GOOD_AGAIN = 300, 700
# In tokens: a round commits at least one, and hardly more while the drafter is rarely right.
FOLLOWED_WITHIN = 65
LONG = 300


@functools.cache
def seconds(num_tokens: int, cost: float, slope: float, kappa: float, *changes: tuple[int, float]) -> float:
    scenario = Scenario(GOOD, cost, contention=kappa, verify_slope=slope, acceptance_changes=changes)
    return run_simulation(scenario, num_tokens=num_tokens).seconds


def pace(begin: int, machine: tuple[float, float, float], *changes: tuple[int, float]) -> float:
    """Seconds per token, from the token at index `begin` on."""
    return (seconds(begin + LONG, *machine, *changes) - seconds(begin, *machine, *changes)) / LONG


# Cost of drafting, price of width, contention.
MACHINES = [(0.1, 0.06, 0.0), (0.2, 0.06, 0.3), (0.1, 0.5, 0.0)]
# Here keeping the drafter up to date would cost the target at least 4 % of its time, more than a trial may.
TOO_DEAR = (0.35, 0.06, 1.0)


GOOD_AGAIN_FROM = (BAD_FROM, BAD), (GOOD_AGAIN, GOOD)


@pytest.mark.slow
@sweep("machine", [*MACHINES, TOO_DEAR])
def test_a_drafter_that_becomes_bad_costs_no_more_than_plain_decoding_soon(machine: tuple[float, float, float]) -> None:
    assert pace(BAD_FROM + FOLLOWED_WITHIN, machine, (BAD_FROM, BAD)) < 1.05


@pytest.mark.slow
@sweep("machine", MACHINES)
def test_a_drafter_that_becomes_good_again_is_used_again_soon(machine: tuple[float, float, float]) -> None:
    # At least three quarters of the gain over plain decoding, which takes one second per token.
    always_good = pace(BAD_FROM, machine)
    assert always_good < 0.8
    assert pace(GOOD_AGAIN + FOLLOWED_WITHIN, machine, *GOOD_AGAIN_FROM) < always_good + 0.25 * (1.0 - always_good)


@pytest.mark.slow
def test_where_finding_out_is_too_dear_a_drafter_that_was_bad_is_left_alone() -> None:
    assert pace(GOOD_AGAIN + FOLLOWED_WITHIN, TOO_DEAR, *GOOD_AGAIN_FROM) < 1.03
    changes = ((BAD_FROM, BAD), (GOOD_AGAIN, GOOD))
    assert pace(GOOD_AGAIN + FOLLOWED_WITHIN, TOO_DEAR, *changes) < 1.03
