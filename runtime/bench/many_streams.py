"""The benchmark of many streams: the same prompts at once on one runtime, one after another on it, at once without
sharing passes, and in mlx-lm's `BatchGenerator`, which decodes several prompts in one pass but cannot speculate.

Every contender runs every number of streams in every repeat, in an order that changes each time, so that disturbances
of the machine hit all contenders alike. Compare only ratios within one such benchmark.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import attrs

from actors.workers.worker import JobError
from protocol.errors import ModelError, SettingsError
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integers, validator
from runtime.bench.contenders import ONLY_DRAFT, PLAIN, Lookahead
from runtime.bench.many_stream_contenders import BATCHED, StreamsContender, StreamsKind, StreamsRun, StreamsRunner
from runtime.bench.setup import (
    BenchmarkCircumstances,
    BenchmarkRequest,
    load_models,
    ratio,
    running_order,
    time_left,
    total,
    without_repeats,
)
from runtime.loading.demo import STREAM_PROMPTS
from runtime.loading.model_sources import Source

MAX_STREAMS = 256

OUR_KINDS: tuple[StreamsKind, ...] = ("one after another", "in turns", "at once")


@attrs.frozen(kw_only=True)
class StreamsPlan(BenchmarkRequest):
    """What to measure.

    Raises: SettingsError, PromptError: something is out of its range.

    Attributes:
        prompts: one a stream; more streams than prompts begin again with the first prompt.
        streams: numbers of streams, each in [1, 256].
        lookaheads: lookaheads of this runtime's streams, each in [0, 64] or "auto"; each has a runtime of its own.
    """

    prompts: tuple[str | Sequence[int], ...] = attrs.field(default=STREAM_PROMPTS, converter=tuple)
    streams: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8, 16), converter=without_repeats, validator=validator(check_integers, 1, MAX_STREAMS)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=("auto",),
        converter=without_repeats,
        validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True),
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.kv_bits is not None:
            raise SettingsError.of(
                "{kv_bits} is not for many streams: mlx-lm's BatchGenerator cannot quantise caches; leave it out"
            )

    @property
    def contenders(self) -> tuple[StreamsContender, ...]:
        """All contenders. For each lookahead, the baselines of "at once" come first."""
        return (*(StreamsContender(kind, each) for each in self.lookaheads for kind in OUR_KINDS), BATCHED)


# --- results --------------------------------------------------------------------------------------


@attrs.frozen
class StreamsRow:
    """The figures of one contender with some number of streams.

    Speeds are tokens of all streams per second, from the call to the last token, prompts included.

    Attributes:
        name, kind, lookahead: see `StreamsContender`.
        streams: number of streams.
        speeds: one a repeat.
        median, low, high: median, minimum and maximum of `speeds`; None without speeds.
        vs_one_after_another: median over that of the same streams one after another; None for mlx-lm.
        vs_in_turns: median over that of the same streams at once without sharing passes; None for mlx-lm.
        vs_batched: median over that of mlx-lm's `BatchGenerator`.
        target_busy, draft_busy: fraction of the time in which the model's thread worked. None for mlx-lm, as all that
            follows up to `drafted_per_token`.
        rows_per_pass: mean number of streams in a forward pass of the target that verifies or decodes.
        tokens_per_round: tokens per round of a stream.
        proposal: mean number of tokens proposed for a round.
        acceptance: accepted / proposed; None if nothing was proposed.
        hit_rate: fraction of verdicts whose text had been drafted ahead.
        drafted_per_token: draft steps per token, the cost of drafting.
        first_token: median time from the call to a stream's first token, in seconds; with streams one after another it
            includes the earlier streams.
        longest_wait: longest time between two tokens of a stream in any repeat, in seconds.
        peak_bytes: most memory that MLX held at once in any repeat, beyond what it held before: caches and passes, and
            not the weights.
        same_texts, num_texts: number of texts equal to mlx-lm's plain decoding of the prompt alone, and of all texts.
            In low precision a pass of another width, or over more texts, may decide a near-tie differently. None above
            temperature 0.
        failure: why the contender could not run; None if it could.
    """

    name: str
    kind: str
    lookahead: Lookahead
    streams: int
    speeds: tuple[float, ...]
    median: float | None
    low: float | None
    high: float | None
    vs_one_after_another: float | None
    vs_in_turns: float | None
    vs_batched: float | None
    target_busy: float | None
    draft_busy: float | None
    rows_per_pass: float | None
    tokens_per_round: float | None
    proposal: float | None
    acceptance: float | None
    hit_rate: float | None
    drafted_per_token: float | None
    first_token: float | None
    longest_wait: float | None
    peak_bytes: int | None
    same_texts: int | None
    num_texts: int
    failure: str | None


@attrs.frozen
class StreamsBenchmark:
    """The results of a benchmark of many streams, and its circumstances.

    Attributes:
        target, draft, dtypes, machine: see `runtime.bench.setup.BenchmarkCircumstances`.
        streams, max_tokens, temperature: see `StreamsPlan`.
        repeats: number of repeats that were requested.
        repeats_done: number of repeats in the figures; the last may have some of the numbers of streams only.
        is_complete: whether everything was measured.
        rows: by number of streams, in the order of `StreamsPlan.contenders`.
    """

    target: str
    draft: str
    dtypes: dict[str, tuple[str, ...]]
    machine: dict[str, str]
    streams: tuple[int, ...]
    max_tokens: int
    temperature: float
    repeats: int
    repeats_done: int
    is_complete: bool
    rows: tuple[StreamsRow, ...]


@attrs.define
class StreamsMeasured(BenchmarkCircumstances):
    """The measurements so far; `result` may be called at any time.

    Attributes:
        plan: what to measure.
        alone: the texts that mlx-lm decodes plainly for each prompt alone.
        turns: runs of the contenders, by (repeat, number of streams); a turn that was interrupted lacks some.
        failures: why a contender cannot run.
    """

    plan: StreamsPlan
    alone: list[tuple[int, ...]] = attrs.field(factory=list)
    turns: dict[tuple[int, int], dict[StreamsContender, StreamsRun]] = attrs.field(factory=dict)
    failures: dict[StreamsContender, str] = attrs.field(factory=dict)

    def result(self) -> StreamsBenchmark:
        """The figures, from the turns in which every contender ran; incomplete turns would favour some."""
        running = [contender for contender in self.plan.contenders if contender not in self.failures]
        turns = {key: turn for key, turn in self.turns.items() if all(contender in turn for contender in running)}
        rows: list[StreamsRow] = []
        for streams in self.plan.streams:
            matching = [turn for (_, number), turn in turns.items() if number == streams]
            rows += self._compared([self._row(contender, streams, matching) for contender in self.plan.contenders])
        return StreamsBenchmark(
            target=self.target,
            draft=self.draft,
            dtypes=self.dtypes,
            machine=self.machine,
            streams=self.plan.streams,
            max_tokens=self.plan.max_tokens,
            temperature=self.plan.temperature,
            repeats=self.plan.repeats,
            repeats_done=len({repeat for repeat, _ in turns}),
            is_complete=len(turns) == self.plan.repeats * len(self.plan.streams),
            rows=tuple(rows),
        )

    def _compared(self, rows: Sequence[StreamsRow]) -> list[StreamsRow]:
        medians = {(row.kind, row.lookahead): row.median for row in rows}
        batched = medians[BATCHED.kind, BATCHED.lookahead]
        return [
            attrs.evolve(
                row,
                vs_one_after_another=ratio(row.median, medians.get(("one after another", row.lookahead)))
                if row.kind != BATCHED.kind
                else None,
                vs_in_turns=ratio(row.median, medians.get(("in turns", row.lookahead)))
                if row.kind != BATCHED.kind
                else None,
                vs_batched=ratio(row.median, batched),
            )
            for row in rows
        ]

    def _row(
        self, contender: StreamsContender, streams: int, turns: Sequence[dict[StreamsContender, StreamsRun]]
    ) -> StreamsRow:
        runs = [turn[contender] for turn in turns if contender in turn]
        speeds = tuple(run.num_tokens / run.seconds for run in runs)
        seconds, rounds, num_tokens = total(runs, "seconds"), total(runs, "rounds"), total(runs, "num_tokens")
        hits, misses = total(runs, "hits"), total(runs, "misses")
        same = sum(text == self.alone[n % len(self.alone)] for run in runs for n, text in enumerate(run.texts))
        firsts = [first for run in runs for first in run.first_tokens]
        return StreamsRow(
            name=contender.name,
            kind=contender.kind,
            lookahead=contender.lookahead,
            streams=streams,
            speeds=speeds,
            median=statistics.median(speeds) if speeds else None,
            low=min(speeds, default=None),
            high=max(speeds, default=None),
            vs_one_after_another=None,
            vs_in_turns=None,
            vs_batched=None,
            target_busy=ratio(total(runs, "target_seconds"), seconds),
            draft_busy=ratio(total(runs, "draft_seconds"), seconds),
            rows_per_pass=ratio(total(runs, "pass_rows"), total(runs, "passes")),
            tokens_per_round=ratio(num_tokens, rounds),
            proposal=ratio(total(runs, "proposed"), rounds),
            acceptance=ratio(total(runs, "accepted"), total(runs, "proposed")),
            hit_rate=None if hits is None or misses is None else ratio(hits, hits + misses),
            drafted_per_token=ratio(total(runs, "drafted"), num_tokens),
            first_token=statistics.median(firsts) if firsts else None,
            longest_wait=max((run.longest_wait for run in runs), default=None),
            peak_bytes=max((run.peak_bytes for run in runs), default=None),
            same_texts=None if self.plan.temperature > 0 else same,
            num_texts=sum(len(run.texts) for run in runs),
            failure=self.failures.get(contender),
        )


# --- measuring ------------------------------------------------------------------------------------


async def measure_streams(
    target: Source,
    draft: Source,
    plan: StreamsPlan | None = None,
    *,
    measured: StreamsMeasured | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StreamsBenchmark:
    """Have all contenders decode all numbers of streams, in turn.

    Args, Raises, Cancellation: as `runtime.bench.one_stream.measure`.
    """
    measured = measured or StreamsMeasured(plan or StreamsPlan())
    plan = measured.plan
    async with AsyncExitStack() as stack:
        pair, prompts = await load_models(stack, target, {ONLY_DRAFT: draft}, plan, measured, on_progress)
        runner = StreamsRunner(pair)
        runtimes = dict.fromkeys(each.runtime for each in plan.contenders if each.kind != "batched")
        # No prompt is cached from the run before: mlx-lm's batches read all of them, too.
        await runner.open_runtimes(stack, runtimes, prefix_cache_bytes=0)
        await _run_all(runner, prompts, measured, on_progress)
    return measured.result()


async def _run_all(
    runner: StreamsRunner,
    prompts: Sequence[tuple[int, ...]],
    measured: StreamsMeasured,
    on_progress: Callable[[str], None],
) -> None:
    plan = measured.plan
    used = prompts[: max(plan.streams)]
    for number, prompt in enumerate(used, start=1):
        on_progress(f"decoding the reference texts plainly ({number} of {len(used)})")
        try:
            reference = await runner.run(PLAIN, prompt, plan.max_tokens, plan.temperature)
        except JobError as error:
            raise ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}") from error.__cause__
        measured.alone.append(reference.tokens)
    total_streams = len(plan.contenders) * sum(plan.streams) * plan.repeats
    began, done = 0.0, 0

    async def run_streams(contender: StreamsContender, streams: int, when: str) -> StreamsRun | None:
        if contender in measured.failures:
            return None
        left = time_left(began, done, total_streams).lstrip(", ")
        on_progress(f"{when}: {contender.name}" + (f" ({left})" if left else ""))
        chosen = [prompts[n % len(prompts)] for n in range(streams)]
        try:
            return await runner.run_streams(contender, chosen, plan.max_tokens, plan.temperature)
        except JobError as error:
            measured.failures[contender] = str(error.__cause__)
            return None

    # The first run of each contender builds kernels and buffers.
    for contender in plan.contenders:
        await run_streams(contender, min(2, max(plan.streams)), "warming up")
    began = time.perf_counter()
    for repeat in range(plan.repeats):
        for place, streams in enumerate(plan.streams):
            turn = measured.turns.setdefault((repeat, streams), {})
            when = f"repeat {repeat + 1} of {plan.repeats}, {_streams(streams)}"
            for contender in running_order(plan.contenders, repeat * len(plan.streams) + place):
                if (run := await run_streams(contender, streams, when)) is not None:
                    turn[contender] = run
                done += streams


def _streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"
