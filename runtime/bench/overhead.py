"""The benchmark of the runtime itself: what it adds to a token, with a model so small that nothing else counts.

Compared are mlx-lm's loops without a runtime around them: `generate_step` for one stream, and `BatchGenerator`. The
drafter has other weights than the target, so that nearly each drafted token is rejected and each token costs a round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import attrs
from mlx.nn.layers.base import Module

from protocol.validation import check_integer, check_integers, validator
from runtime.bench.contenders import ONLY_DRAFT
from runtime.bench.many_stream_contenders import BATCHED, STEP_BY_STEP, StreamsContender, StreamsRunner
from runtime.bench.many_streams import MAX_STREAMS
from runtime.bench.setup import (
    MIN_TOKENS,
    BenchmarkCircumstances,
    BenchmarkRequest,
    load_models,
    ratio,
    running_order,
    time_left,
    without_repeats,
)
from runtime.bench.small_models import VOCAB_SIZE, small_model

NUM_PROMPT_TOKENS = 8

# By name: this runtime without a drafter, with one that rests since it does not pay, and with a fixed lookahead.
OUR_WAYS = {
    "outrider plain": StreamsContender("at once", 0),
    "outrider resting": StreamsContender("at once", "auto"),
    "outrider lookahead 2": StreamsContender("at once", 2),
}
WAYS = {STEP_BY_STEP.name: STEP_BY_STEP, BATCHED.name: BATCHED} | OUR_WAYS


@attrs.frozen(kw_only=True)
class OverheadPlan:
    """What to measure.

    Raises: SettingsError: something is out of its range.

    Attributes:
        streams: numbers of streams at once, each in [1, 256].
        max_tokens: tokens of each stream, >= 16.
        repeats: number of times that everything runs, >= 1.
    """

    streams: tuple[int, ...] = attrs.field(
        default=(1, 4, 16, 64), converter=without_repeats, validator=validator(check_integers, 1, MAX_STREAMS)
    )
    max_tokens: int = attrs.field(default=128, validator=validator(check_integer, MIN_TOKENS))
    repeats: int = attrs.field(default=3, validator=validator(check_integer, 1))

    @property
    def runs(self) -> tuple[tuple[int, str], ...]:
        """Each number of streams with each way to decode them, by name, mlx-lm's first."""
        return tuple(
            (streams, way) for streams in self.streams for way in WAYS if streams == 1 or way != STEP_BY_STEP.name
        )


@attrs.frozen
class OverheadRow:
    """The figures of one way to decode a number of streams.

    Attributes:
        streams: at once.
        way: to decode them; see `WAYS`.
        microseconds: for a token of all streams, from the call to the last token; one figure a repeat.
        median, low, high: of `microseconds`; None without any.
        vs_mlx_lm: median over that of mlx-lm: of `generate_step` for one stream, else of `BatchGenerator`.
    """

    streams: int
    way: str
    microseconds: tuple[float, ...]
    median: float | None
    low: float | None
    high: float | None
    vs_mlx_lm: float | None


@attrs.frozen
class Overhead:
    """The results, and their circumstances; see `StreamsBenchmark` for the attributes that are not explained here.

    Attributes:
        rows: in the order of `OverheadPlan.runs`.
    """

    machine: dict[str, str]
    max_tokens: int
    repeats: int
    repeats_done: int
    is_complete: bool
    rows: tuple[OverheadRow, ...]


@attrs.define
class OverheadMeasured(BenchmarkCircumstances):
    """The measurements so far; `result` may be called at any time.

    Attributes:
        plan: what to measure.
        repeats: by repeat, the microseconds a token of each run. An interrupted repeat lacks some, and is left out.
    """

    plan: OverheadPlan
    repeats: list[dict[tuple[int, str], float]] = attrs.field(factory=list)

    def result(self) -> Overhead:
        """The figures of the repeats that are complete."""
        whole = [repeat for repeat in self.repeats if len(repeat) == len(self.plan.runs)]
        found = {run: tuple(repeat[run] for repeat in whole) for run in self.plan.runs}
        medians = {run: statistics.median(values) if values else None for run, values in found.items()}
        rows = []
        for streams, way in self.plan.runs:
            values, baseline = found[streams, way], (STEP_BY_STEP if streams == 1 else BATCHED).name
            median = medians[streams, way]
            vs_mlx_lm = ratio(median, medians[streams, baseline])
            rows.append(
                OverheadRow(
                    streams, way, values, median, min(values, default=None), max(values, default=None), vs_mlx_lm
                )
            )
        return Overhead(
            self.machine,
            self.plan.max_tokens,
            self.plan.repeats,
            len(whole),
            len(whole) == self.plan.repeats,
            tuple(rows),
        )


def smallest_model(seed: int) -> Module:
    """A language model whose pass takes no time worth speaking of, evaluated on this thread."""
    return small_model("llama", seed, num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16)


async def measure_overhead(
    measured: OverheadMeasured, *, on_progress: Callable[[str], None] = lambda _: None
) -> Overhead:
    """Have every way decode every number of streams, in turn.

    Args:
        measured: collects the measurements, also those of a call that is cancelled.
        on_progress: called with a description of each step before it starts.

    Cancellation: takes effect after the current forward passes.
    """
    plan = measured.plan
    prompts: list[tuple[int, ...]] = [
        tuple((7 * stream + 3 * i) % VOCAB_SIZE for i in range(NUM_PROMPT_TOKENS)) for stream in range(MAX_STREAMS)
    ]
    request = BenchmarkRequest(prompts=cast(Any, prompts[: max(plan.streams)]), max_tokens=plan.max_tokens)
    async with AsyncExitStack() as stack:
        sources = (smallest_model(0), None), {ONLY_DRAFT: (smallest_model(1), None)}
        pair, _ = await load_models(stack, *sources, request, measured, on_progress)
        runner = StreamsRunner(pair)
        await runner.open_runtimes(stack, [way.runtime for way in OUR_WAYS.values()], prefix_cache_bytes=0)

        async def microseconds(streams: int, way: str) -> float:
            run = await runner.run_streams(WAYS[way], prompts[:streams], plan.max_tokens, temperature=0.0)
            return 1e6 * run.seconds / run.num_tokens

        # The first run of each builds kernels and buffers, and measures its first prices.
        for number, (streams, way) in enumerate(plan.runs, start=1):
            on_progress(f"warming up: {way}, {number} of {len(plan.runs)}")
            await microseconds(streams, way)
        began, num_runs = time.perf_counter(), len(plan.runs)
        for repeat in range(plan.repeats):
            measured.repeats.append({})
            for number, (streams, way) in enumerate(running_order(plan.runs, repeat)):
                left = time_left(began, repeat * num_runs + number, plan.repeats * num_runs)
                on_progress(f"repeat {repeat + 1} of {plan.repeats}: {way}, {streams} at once{left}")
                measured.repeats[-1][streams, way] = await microseconds(streams, way)
    return measured.result()
