"""The real runtime over a scripted pair of models, in simulated time.

A few numbers decide what a draft model buys on a machine: the price of its step beside the target's, how often it is
right and how well it knows that, how the price of a pass grows with its width, and how much the two models slow each
other down. A `Scenario` names them. The actors, the lookahead tree and the policy are the real ones, so they decide
as they would on such a machine, but without its noise.

The unit of time is T_v(1), the time that the target takes to decode one token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import attrs
import trio
import trio.testing

from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.warm_up import warm_up
from actors.workers.simulated_worker import Contention, SimulatedWorker
from actors.workers.worker import Job
from protocol.open_options import MAX_BATCH
from protocol.prices import Prices
from protocol.statistics import Statistics
from protocol.trace import Span
from runtime.engine.events import Events
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_models import PROMPT, ScriptedDraft, ScriptedTarget

# Simulated time after which a run that hangs is cancelled. Without this deadline the clock would have nothing to jump
# to.
_TIMEOUT = 1e12

# Factor that keeps draft steps from ending at the very moment when a verify pass ends. trio runs tasks that wake at
# the same moment in any order, so the result of a scenario would depend on chance.
_OFFSET_FACTOR = 1.0 + 2.0**-30


# --- one stream -----------------------------------------------------------------------------------


@attrs.frozen
class SimulatedRun:
    """The result of one stream in a scenario.

    Attributes:
        speed: tokens per T_v(1); plain decoding without overhead has 1.
        seconds: simulated time from the call to the last token, in units of T_v(1).
        statistics: those of the stream.
    """

    speed: float
    seconds: float
    statistics: Statistics


def run_simulation(
    scenario: Scenario,
    *,
    num_tokens: int = 2000,
    lookahead: int | Literal["auto"] = "auto",
    make_policy: MakePolicy = policy_by_settings,
) -> SimulatedRun:
    """Generate one text in simulated time, in a trio event loop of its own.

    The result depends on the arguments alone.

    Args:
        scenario: what to simulate.
        num_tokens: length of the text, >= 1.
        lookahead: as in `Settings`; 0 is plain decoding.
        make_policy: makes the policy that decides how far to draft ahead.

    Raises: SettingsError: a setting is out of its range.
    """

    async def main() -> SimulatedRun:
        async with simulated_runtime(scenario, Events(), make_policy=make_policy) as runtime:
            stream = runtime.stream(PROMPT, max_tokens=num_tokens, lookahead=lookahead)
            async with stream:
                async for _ in stream:
                    pass
            statistics = stream.statistics()
        return SimulatedRun(statistics.generated_tokens / statistics.elapsed, statistics.elapsed, statistics)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


# --- the runtime ----------------------------------------------------------------------------------


@asynccontextmanager
async def simulated_runtime(
    scenario: Scenario,
    events: Events,
    *,
    make_policy: MakePolicy = policy_by_settings,
    max_batch: int = MAX_BATCH,
) -> AsyncIterator[Runtime]:
    """A runtime over the scripted pair of a scenario, warmed up; needs an autojumping clock.

    Args:
        scenario: what to simulate.
        events: where the workers announce their spans.
        make_policy: makes the policy that decides how far to draft ahead.
        max_batch: most streams that share one pass of the target, in [1, 32].
    """
    contention = Contention(scenario.contention)

    def verify_price(job: Job[Any]) -> float:
        num_rows = rows_of(job)
        return scenario.verify_seconds(num_rows) if num_rows else 0.0

    def draft_price(job: Job[Any]) -> float:
        return _OFFSET_FACTOR * scenario.draft_seconds(job.num_tokens) if job.num_tokens else 0.0

    target = SimulatedWorker("target", verify_price, events, contention)
    draft = SimulatedWorker("draft", draft_price, events, contention)
    prices = Prices()
    models = ((ScriptedTarget(scenario), target), (ScriptedDraft(scenario), draft))
    with trio.fail_after(_TIMEOUT):
        await warm_up(*models, prices)
        async with running(
            *models, events=events, prices=prices, make_policy=make_policy, max_batch=max_batch
        ) as runtime:
            yield runtime


def rows_of(job: Job[Any] | Span) -> int:
    """Rows that a pass computes: texts that share it are padded to the widest of them, and padding costs as much."""
    if not job.shares:
        return job.num_tokens
    return len(job.shares) * max(share.num_tokens for share in job.shares)
