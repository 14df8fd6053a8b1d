"""The real runtime over a scripted pair of models, in simulated time: one text, or several at once.

A few numbers decide what a draft model gains on a machine: the price of its step relative to the target's, how often it
is right and how well it knows that, how the price of a pass grows with its width, and how much the two models slow each
other down. A `Scenario` has them. The actors, the lookahead tree and the policy are the real ones, so they decide
as they would on such a machine, but without its noise.

The unit of time is T_v(1), the time that the target takes to decode one token. Rounds of several streams share a pass
of the target, whose time is that of all its rows: padding is computed, too.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

import attrs
import trio
import trio.testing
from scenario import Scenario
from scripted_models import PROMPT, ScriptedDraft, ScriptedTarget
from simulated_worker import Contention, SimulatedWorker

from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.model import Model
from actors.warm_up import warm_up
from actors.workers.worker import Job
from protocol.open_options import MAX_BATCH
from protocol.prices import Prices
from protocol.settings import Settings
from protocol.statistics import Statistics
from protocol.trace import Event, Events, Span
from runtime.engine.opening import running
from runtime.engine.runtime import Runtime

# Simulated time after which a run that hangs is cancelled. Without this deadline the clock would have nothing to jump
# to.
_TIMEOUT = 1e12

# Factor that keeps draft steps from ending at the very moment when a verify pass ends. trio runs tasks that wake at
# the same moment in any order, so the result of a scenario would depend on chance.
_OFFSET_FACTOR = 1.0 + 2.0**-30


# --- the runtime ----------------------------------------------------------------------------------


@asynccontextmanager
async def simulated_runtime(
    scenario: Scenario,
    events: Events,
    *,
    pair: tuple[Model, Model] | None = None,
    prompts_are_free: bool = False,
    make_policy: MakePolicy = policy_by_settings,
    max_batch: int = MAX_BATCH,
) -> AsyncIterator[Runtime]:
    """A runtime over a target and a drafter, by default the scripted ones of a scenario, warmed up; needs an
    autojumping clock. Reading prompts takes no time if `prompts_are_free`.
    """
    contention = Contention(scenario.contention)

    def is_free(job: Job[Any]) -> bool:
        return prompts_are_free and job.kind == "prefill"

    def verify_price(job: Job[Any]) -> float:
        num_rows = rows_of(job)
        return scenario.verify_seconds(num_rows) if num_rows and not is_free(job) else 0.0

    def draft_price(job: Job[Any]) -> float:
        costs = job.num_tokens and not is_free(job)
        return _OFFSET_FACTOR * scenario.draft_seconds(job.num_tokens) if costs else 0.0

    target = SimulatedWorker("target", verify_price, events, contention)
    draft = SimulatedWorker("draft", draft_price, events, contention)
    prices = Prices()
    target_model, draft_model = pair or (ScriptedTarget(scenario), ScriptedDraft(scenario))
    models = ((target_model, target), (draft_model, draft))
    with trio.fail_after(_TIMEOUT):
        await warm_up(*models, prices)
        async with running(*models, events=events, prices=prices, make_policy=make_policy, max_batch=max_batch) as rt:
            yield rt


def rows_of(job: Job[Any]) -> int:
    """Rows that a pass computes: texts that share it are padded to the widest of them, and padding costs as much."""
    if not job.shares:
        return job.num_tokens
    return len(job.shares) * max(share.num_tokens for share in job.shares)


# --- one stream -----------------------------------------------------------------------------------


@attrs.frozen
class SimulatedRun:
    """The result of one stream in a scenario."""

    speed: float  # tokens per T_v(1); plain decoding without overhead has 1
    seconds: float  # simulated time from the call to the last token, in units of T_v(1)
    statistics: Statistics


def run_simulation(
    scenario: Scenario,
    *,
    num_tokens: int = 2000,
    lookahead: int | Literal["auto"] = "auto",
    make_policy: MakePolicy = policy_by_settings,
) -> SimulatedRun:
    """Generate one text of `num_tokens` in simulated time, in a trio event loop of its own.

    The result depends on the arguments alone. A lookahead of 0 is plain decoding.
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


# --- several streams ---------------------------------------------------------------------------


@attrs.frozen
class SimulatedStreams:
    """The result of several streams in one scenario. Times are in units of T_v(1)."""

    speed: float  # tokens of all streams per T_v(1), from the call to the last token of all
    steady_speed: float  # the same up to the end of the stream that ends first: while all are at work
    seconds: float  # simulated time from the call to the last token of all
    busy_seconds: dict[str, float]  # of each model
    statistics: tuple[Statistics, ...]  # those of the streams, in the order in which they ended


def simulate_streams(
    scenario: Scenario,
    num_streams: int,
    *,
    num_tokens: int = 500,
    lookahead: int | Literal["auto"] = "auto",
    max_batch: int = MAX_BATCH,
    at_once: bool = True,
) -> SimulatedStreams:
    """Generate several texts on one runtime in simulated time, in a trio event loop of its own.

    Each stream, of at most 64, has its own one-token prompt, so that its text and drafts have nothing in common with
    those of the others. If not all are `at_once`, each starts when the one before has ended. The result depends on the
    arguments alone.
    """
    events, heard, settings = Events(), list[Event](), Settings(max_tokens=num_tokens, lookahead=lookahead)
    token_times: list[list[float]] = [[] for _ in range(num_streams)]
    statistics: list[Statistics] = []

    async def read(runtime: Runtime, first_token: int) -> None:
        stream = runtime.stream((first_token,), settings)
        async with stream:
            async for _ in stream:
                token_times[first_token].append(trio.current_time())
        statistics.append(stream.statistics())

    async def main() -> tuple[float, float]:
        async with simulated_runtime(scenario, events, max_batch=max_batch) as runtime:
            events.listen(heard.append, only_spans=True)
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for first_token in range(num_streams):
                    if at_once:
                        nursery.start_soon(read, runtime, first_token)
                    else:
                        await read(runtime, first_token)
            return began, trio.current_time()

    with _seeded_scheduler():
        began, ended = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    spans = [event for event in heard if isinstance(event, Span)]
    busy_seconds = {
        actor: sum(span.ended - span.began for span in spans if span.actor == actor) for actor in ("target", "draft")
    }
    seconds, first_end = ended - began, min(times[-1] for times in token_times)
    return SimulatedStreams(
        speed=sum(map(len, token_times)) / seconds,
        steady_speed=sum(at <= first_end for times in token_times for at in times) / (first_end - began),
        seconds=seconds,
        busy_seconds=busy_seconds,
        statistics=tuple(statistics),
    )


@contextmanager
def _seeded_scheduler() -> Iterator[None]:
    """Have trio run tasks that wake at the same moment in the same order each time.

    A shared pass wakes several streams at once, and the drafter serves them in the order in which they run.
    """
    # trio has no public way. Hypothesis is given the same object, for the same purpose.
    dice = trio._core._run._r
    before = dice.getstate()
    dice.seed(0)
    try:
        yield
    finally:
        dice.setstate(before)
