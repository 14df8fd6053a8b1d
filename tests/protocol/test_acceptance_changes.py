"""The automatic lookahead follows a change of the acceptance rate in mid-stream within about fifty rounds."""

from __future__ import annotations

import pytest
import trio
from scenario import Scenario
from scripted import run
from scripted_models import PROMPT
from simulation import simulated_runtime
from sweeps import sweep

from protocol.trace import Events

GOOD, BAD = 0.9, 0.2
BAD_FROM, GOOD_AGAIN = 300, 700
# In tokens: a round commits at least one, and hardly more while the drafter is rarely right.
FOLLOWED_WITHIN = 65
LONG = 300


def token_times(machine: tuple[float, float, float], *changes: tuple[int, float], num_tokens: int) -> list[float]:
    """When each token of a text came; of a machine with this cost of drafting, price of width, and contention."""
    cost, slope, kappa = machine
    scenario = Scenario(GOOD, cost, contention=kappa, verify_slope=slope, acceptance_changes=changes)
    times = []

    async def main() -> None:
        async with simulated_runtime(scenario, Events()) as runtime:
            async for _ in runtime.stream(PROMPT, max_tokens=num_tokens):
                times.append(trio.current_time())

    run(main)
    return times


def pace(times: list[float], begin: int) -> float:
    """Seconds per token, from the token at index `begin` on."""
    return (times[begin + LONG] - times[begin]) / LONG


def paces(machine: tuple[float, float, float]) -> tuple[float, float]:
    """The pace soon after the drafter has become bad, and soon after it has become good again."""
    bad_from, good_from = BAD_FROM + FOLLOWED_WITHIN, GOOD_AGAIN + FOLLOWED_WITHIN
    times = token_times(machine, (BAD_FROM, BAD), (GOOD_AGAIN, GOOD), num_tokens=good_from + LONG + 1)
    return pace(times, bad_from), pace(times, good_from)


# Plain decoding takes one second per token.


@pytest.mark.slow
@sweep("machine", [(0.1, 0.06, 0.0), (0.1, 0.5, 0.0)])
def test_a_drafter_that_turns_bad_soon_costs_little_and_recovers(
    machine: tuple[float, float, float],
) -> None:
    bad, good_again = paces(machine)
    assert bad < 1.05
    always_good = pace(token_times(machine, num_tokens=BAD_FROM + LONG + 1), BAD_FROM)
    assert always_good < 0.8
    # At least three quarters of the gain.
    assert good_again < always_good + 0.25 * (1.0 - always_good)


@pytest.mark.slow
def test_where_finding_out_is_too_dear_a_drafter_that_was_bad_is_left_alone() -> None:
    # Here keeping the drafter up to date would cost the target at least 4 % of its time, more than a trial may.
    bad, good_again = paces((0.35, 0.06, 1.0))
    assert bad < 1.05
    assert good_again < 1.03
