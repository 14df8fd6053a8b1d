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
from protocol.prices import Prices
from protocol.statistics import Statistics
from protocol.validation import check_integer
from runtime.engine.events import Events
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.simulation.scenario import Scenario
from runtime.simulation.scripted_models import PROMPT, VOCAB_SIZE, ScriptedDraft, ScriptedTarget

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
        async with _open_runtime(scenario, make_policy) as runtime:
            statistics = await _read(runtime, PROMPT, num_tokens, lookahead)
        return SimulatedRun(statistics.generated_tokens / statistics.elapsed, statistics.elapsed, statistics)

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def _read(
    runtime: Runtime, prompt: tuple[int, ...], num_tokens: int, lookahead: int | Literal["auto"]
) -> Statistics:
    """Read a stream to its end."""
    stream = runtime.stream(prompt, max_tokens=num_tokens, lookahead=lookahead)
    async with stream:
        async for _ in stream:
            pass
    return stream.statistics()


@asynccontextmanager
async def _open_runtime(scenario: Scenario, make_policy: MakePolicy) -> AsyncIterator[Runtime]:
    contention, events = Contention(scenario.contention), Events()

    def verify_price(job: Job[Any]) -> float:
        return scenario.verify_seconds(job.num_tokens) if job.num_tokens else 0.0

    def draft_price(job: Job[Any]) -> float:
        return _OFFSET_FACTOR * scenario.draft_seconds(job.num_tokens) if job.num_tokens else 0.0

    target = SimulatedWorker("target", verify_price, events, contention)
    draft = SimulatedWorker("draft", draft_price, events, contention)
    prices = Prices()
    models = ((ScriptedTarget(scenario), target), (ScriptedDraft(scenario), draft))
    with trio.fail_after(_TIMEOUT):
        await warm_up(*models, prices)
        async with running(*models, events=events, prices=prices, make_policy=make_policy) as runtime:
            yield runtime


# --- many streams ---------------------------------------------------------------------------------


@attrs.frozen
class SimulatedStreams:
    """The result of several streams in one scenario.

    Attributes:
        speed: tokens of all streams per T_v(1).
        seconds: simulated time from the call to the last token of all, in units of T_v(1).
        target_busy, draft_busy: fraction of that time in which the model was at work.
        statistics: those of the streams, in the order in which they ended.
    """

    speed: float
    seconds: float
    target_busy: float
    draft_busy: float
    statistics: tuple[Statistics, ...]

    @property
    def proposal(self) -> float:
        """Mean number of tokens proposed for a target pass."""
        return sum(each.proposed for each in self.statistics) / sum(each.rounds for each in self.statistics)


def run_many_streams(
    scenario: Scenario,
    num_streams: int,
    *,
    at_once: bool,
    num_tokens: int = 500,
    lookahead: int | Literal["auto"] = "auto",
) -> SimulatedStreams:
    """Generate several different texts on one runtime in simulated time, in a trio event loop of its own.

    Args:
        scenario: what to simulate.
        num_streams: number of texts, in [1, 64].
        at_once: True starts all streams together; False starts each when the one before has ended.
        num_tokens: length of each text, >= 1.
        lookahead: as in `Settings`; 0 is plain decoding.

    Raises: SettingsError: a setting is out of its range.
    """
    check_integer("num_streams", num_streams, 1, VOCAB_SIZE)

    async def main() -> SimulatedStreams:
        done: list[Statistics] = []
        async with _open_runtime(scenario, policy_by_settings) as runtime:
            began, before = trio.current_time(), runtime.statistics()

            async def read(first_token: int) -> None:
                done.append(await _read(runtime, (first_token,), num_tokens, lookahead))

            async with trio.open_nursery() as nursery:
                for first_token in range(num_streams):
                    if at_once:
                        nursery.start_soon(read, first_token)
                    else:
                        await read(first_token)
            seconds, after = trio.current_time() - began, runtime.statistics()
        target_busy, draft_busy = (
            (getattr(after, name) * after.elapsed - getattr(before, name) * before.elapsed) / seconds
            for name in ("target_busy", "draft_busy")
        )
        return SimulatedStreams(num_streams * num_tokens / seconds, seconds, target_busy, draft_busy, tuple(done))

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
