"""The automatic lookahead follows a change of the acceptance rate in mid-stream within about fifty rounds."""

from __future__ import annotations

import pytest
import trio
from scripted import run
from sweeps import sweep

from runtime.engine.events import Events
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_models import PROMPT
from runtime.simulation.simulation import simulated_runtime

GOOD, BAD = 0.9, 0.2
BAD_FROM, GOOD_AGAIN = 300, 700
# In tokens: a round commits at least one, and hardly more while the drafter is rarely right.
FOLLOWED_WITHIN = 65
LONG = 300


def paces(cost: float, slope: float, kappa: float) -> tuple[float, float, float]:
    """Seconds per token before the drafter becomes bad, and soon after it became bad and good again."""
    changes = (BAD_FROM, BAD), (GOOD_AGAIN, GOOD)
    scenario = Scenario(GOOD, cost, contention=kappa, verify_slope=slope, acceptance_changes=changes)
    times = []

    async def main() -> None:
        async with simulated_runtime(scenario, Events()) as runtime:
            async for _ in runtime.stream(PROMPT, max_tokens=GOOD_AGAIN + FOLLOWED_WITHIN + LONG + 1):
                times.append(trio.current_time())

    run(main)
    bad, good = BAD_FROM + FOLLOWED_WITHIN, GOOD_AGAIN + FOLLOWED_WITHIN
    spans = ((BAD_FROM // 3, BAD_FROM), (bad, bad + LONG), (good, good + LONG))
    return tuple((times[end] - times[begin]) / (end - begin) for begin, end in spans)  # type: ignore[return-value]


# Plain decoding takes one second per token.


@pytest.mark.slow
@sweep(("cost", "slope", "contention"), [(0.1, 0.06, 0.0), (0.2, 0.06, 0.3), (0.1, 0.5, 0.0)])
def test_a_drafter_that_becomes_bad_costs_little_soon_and_when_good_again_is_used_soon(
    cost: float, slope: float, contention: float
) -> None:
    good, bad, good_again = paces(cost, slope, contention)
    assert bad < 1.05
    assert good < 0.8
    # At least three quarters of the gain.
    assert good_again < good + 0.25 * (1.0 - good)


@pytest.mark.slow
def test_where_finding_out_is_too_dear_a_drafter_that_was_bad_is_left_alone() -> None:
    # Here keeping the drafter up to date would cost the target at least 4 % of its time, more than a trial may.
    _, bad, good_again = paces(0.35, 0.06, 1.0)
    assert bad < 1.05
    assert good_again < 1.03
