"""What many streams at once bring: the same prompts at once on one runtime, one after another on it, and in mlx-lm's
`BatchGenerator`, which decodes several in one forward pass but cannot speculate.

Every way runs every number of streams in every repeat, and the order changes each time, so that whatever the machine
does meanwhile hits all alike. What counts is ratios within one such run.
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
from runtime.bench.contenders import PLAIN, Contender, Lookahead
from runtime.bench.many_stream_contenders import BATCHED, Group, StreamStage, Way
from runtime.bench.setup import (
    BenchmarkRequest,
    Circumstances,
    once_each,
    order,
    ratio,
    set_up,
    time_left,
    total,
)
from runtime.loading.demo import STREAM_PROMPTS
from runtime.loading.model_sources import Source

MOST_STREAMS = 256


@attrs.frozen(kw_only=True)
class StreamsPlan(BenchmarkRequest):
    """What to measure.

    Raises: SettingsError, PromptError: something is out of its range.

    Attributes:
        prompts: a stream each; where there are more streams, they begin again with the first.
        streams: how many at once, each in [1, 256].
        lookaheads: of this runtime's streams, each in [0, 64] or "auto"; each on a runtime of its own.
    """

    prompts: tuple[str | Sequence[int], ...] = attrs.field(default=STREAM_PROMPTS, converter=tuple)
    streams: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8, 16), converter=once_each, validator=validator(check_integers, 1, MOST_STREAMS)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=("auto",), converter=once_each, validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True)
    )

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.kv_bits is not None:
            raise SettingsError(
                "kv_bits is not for many streams: mlx-lm's BatchGenerator cannot quantise caches; leave it None"
            )

    @property
    def ways(self) -> tuple[Way, ...]:
        """All of them; for each lookahead one after another comes first, and is what streams at once are held to."""
        ours = [Way(kind, each) for each in self.lookaheads for kind in ("one after another", "at once")]
        return (*ours, BATCHED)


# --- results --------------------------------------------------------------------------------------


@attrs.frozen
class StreamsRow:
    """What one way did with some number of streams.

    Speeds are tokens of all streams per second, from the call to the last token, prompts included.

    Attributes:
        name, kind, lookahead: which way; see `Way`.
        streams: how many.
        speeds: one a repeat.
        median, low, high: of those; None where there are none.
        vs_one_after_another: its median over that of the same streams one after another; None for mlx-lm.
        vs_batched: its median over that of mlx-lm's `BatchGenerator`.
        target_busy, draft_busy: fractions of the time in which the model's thread had work. None for mlx-lm, as the
            following up to `drafted_per_token`.
        tokens_per_round: tokens over forward passes of the target.
        proposal: tokens proposed, on average over all rounds: how much is guessed for a pass.
        acceptance: accepted / proposed; None where nothing was proposed.
        hit_rate: verdicts whose text had been drafted for already, of all: how much ahead of them is guessed.
        drafted_per_token: draft steps over tokens: what the guessing costs.
        first_token: seconds from the call to a stream's first token, the median over streams; one after another that
            includes the streams before.
        longest_wait: most seconds between two tokens of a stream, in any repeat.
        same_texts, num_texts: how many of the texts are what mlx-lm decodes plainly for the prompt alone. In low
            precision a pass of another width, or over more texts, may decide a near-tie otherwise. None above
            temperature 0.
        failure: why it could not run; None where it could.
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
    vs_batched: float | None
    target_busy: float | None
    draft_busy: float | None
    tokens_per_round: float | None
    proposal: float | None
    acceptance: float | None
    hit_rate: float | None
    drafted_per_token: float | None
    first_token: float | None
    longest_wait: float | None
    same_texts: int | None
    num_texts: int
    failure: str | None


@attrs.frozen
class StreamsBenchmark:
    """What was measured, and where.

    Attributes:
        target, draft, dtypes, machine: see `runtime.bench.setup.Circumstances`.
        streams, max_tokens, temperature: see `StreamsPlan`.
        repeats: how many were asked for.
        repeats_done: how many of them are in the figures, the last perhaps with some numbers of streams only.
        is_complete: whether nothing was cut short.
        rows: by number of streams, in the order of `StreamsPlan.ways`.
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
class StreamsMeasured(Circumstances):
    """What has been measured so far; `result` may be asked for at any time.

    Attributes:
        plan: what is to be.
        alone: by prompt, its text as mlx-lm decodes it plainly.
        turns: by (repeat, number of streams), which way did what; in a turn that was cut short, some are missing.
        failures: which way cannot run, and why.
    """

    plan: StreamsPlan
    alone: list[tuple[int, ...]] = attrs.field(factory=list)
    turns: dict[tuple[int, int], dict[Way, Group]] = attrs.field(factory=dict)
    failures: dict[Way, str] = attrs.field(factory=dict)

    def result(self) -> StreamsBenchmark:
        """The figures, of turns in which every way ran: others would favour some."""
        running = [way for way in self.plan.ways if way not in self.failures]
        turns = {key: turn for key, turn in self.turns.items() if all(way in turn for way in running)}
        rows: list[StreamsRow] = []
        for streams in self.plan.streams:
            of_number = [turn for (_, number), turn in turns.items() if number == streams]
            rows += self._compared([self._row(way, streams, of_number) for way in self.plan.ways])
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
                vs_batched=ratio(row.median, batched),
            )
            for row in rows
        ]

    def _row(self, way: Way, streams: int, turns: Sequence[dict[Way, Group]]) -> StreamsRow:
        groups = [turn[way] for turn in turns if way in turn]
        speeds = tuple(group.num_tokens / group.seconds for group in groups)
        seconds, rounds, num_tokens = total(groups, "seconds"), total(groups, "rounds"), total(groups, "num_tokens")
        hits, misses = total(groups, "hits"), total(groups, "misses")
        same = sum(text == self.alone[n % len(self.alone)] for group in groups for n, text in enumerate(group.texts))
        firsts = [first for group in groups for first in group.first_tokens]
        return StreamsRow(
            name=way.name,
            kind=way.kind,
            lookahead=way.lookahead,
            streams=streams,
            speeds=speeds,
            median=statistics.median(speeds) if speeds else None,
            low=min(speeds, default=None),
            high=max(speeds, default=None),
            vs_one_after_another=None,
            vs_batched=None,
            target_busy=ratio(total(groups, "target_seconds"), seconds),
            draft_busy=ratio(total(groups, "draft_seconds"), seconds),
            tokens_per_round=ratio(num_tokens, rounds),
            proposal=ratio(total(groups, "proposed"), rounds),
            acceptance=ratio(total(groups, "accepted"), total(groups, "proposed")),
            hit_rate=None if hits is None or misses is None else ratio(hits, hits + misses),
            drafted_per_token=ratio(total(groups, "drafted"), num_tokens),
            first_token=statistics.median(firsts) if firsts else None,
            longest_wait=max((group.longest_wait for group in groups), default=None),
            same_texts=None if self.plan.temperature > 0 else same,
            num_texts=sum(len(group.texts) for group in groups),
            failure=self.failures.get(way),
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
    """Have groups of streams decoded in each way, in turn.

    Args, Raises, Cancellation: as `runtime.bench.one_stream.measure`.
    """
    measured = measured or StreamsMeasured(plan or StreamsPlan())
    plan = measured.plan
    async with AsyncExitStack() as stack:
        cast, prompts = await set_up(stack, target, draft, plan, measured, on_progress)
        stage = StreamStage(cast)
        await stage.open_runtimes(stack, [Contender("outrider", lookahead) for lookahead in plan.lookaheads])
        await _take_turns(stage, prompts, measured, on_progress)
    return measured.result()


async def _take_turns(
    stage: StreamStage,
    prompts: Sequence[tuple[int, ...]],
    measured: StreamsMeasured,
    on_progress: Callable[[str], None],
) -> None:
    plan = measured.plan
    used = prompts[: max(plan.streams)]
    for number, prompt in enumerate(used, start=1):
        on_progress(f"decoding plainly what texts are compared with ({number} of {len(used)})")
        try:
            run = await stage.run(PLAIN, prompt, plan.max_tokens, plan.temperature)
        except JobError as error:
            raise ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}") from error.__cause__
        measured.alone.append(run.tokens)
    to_do = len(plan.ways) * sum(plan.streams) * plan.repeats
    began, done = 0.0, 0

    async def run_group(way: Way, streams: int, when: str) -> Group | None:
        if way in measured.failures:
            return None
        left = time_left(began, done, to_do).lstrip(", ")
        on_progress(f"{when}: {way.name}" + (f" ({left})" if left else ""))
        chosen = [prompts[n % len(prompts)] for n in range(streams)]
        try:
            return await stage.run_group(way, chosen, plan.max_tokens, plan.temperature)
        except JobError as error:
            measured.failures[way] = str(error.__cause__)
            return None

    # The first of each builds kernels and buffers.
    for way in plan.ways:
        await run_group(way, min(2, max(plan.streams)), "warming up")
    began = time.perf_counter()
    for repeat in range(plan.repeats):
        for place, streams in enumerate(plan.streams):
            turn = measured.turns.setdefault((repeat, streams), {})
            when = f"repeat {repeat + 1} of {plan.repeats}, {_streams(streams)}"
            for way in order(plan.ways, repeat * len(plan.streams) + place):
                if (group := await run_group(way, streams, when)) is not None:
                    turn[way] = group
                done += streams


def _streams(number: int) -> str:
    return "1 stream" if number == 1 else f"{number} streams"
