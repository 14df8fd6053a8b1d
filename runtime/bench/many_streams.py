"""The benchmark of many streams: the same prompts at once on one runtime, one after another on it, at once without
sharing passes, and in mlx-lm's `BatchGenerator`, which decodes several prompts in one pass but cannot speculate.

Compare only ratios within one such benchmark.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from actors.workers.worker import JobError
from protocol.errors import SettingsError
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integers, validator
from runtime.bench.benchmark import (
    BUSY,
    FAILURE,
    HIT_RATE,
    LABEL,
    LOOKAHEAD,
    SAME_TEXTS,
    TOKENS_PER_ROUND,
    Benchmark,
    Entry,
    Plan,
    Progress,
    about_models,
    failures,
    plain_failed,
    share,
    speeds_plot,
    spread_figures,
    without_repeats,
)
from runtime.bench.contenders import BATCHED, PLAIN, Contender, ContenderRunner, Kind, Lookahead, Prompts, Run
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.loading.demo import STREAM_PROMPTS
from runtime.loading.model_sources import Source
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Figure, Record, bytes_text, seconds_text, table_of
from runtime.measuring.loaded_models import ONLY_DRAFT, LoadedModels
from runtime.measuring.plots import Plot
from runtime.measuring.reports import Report

MAX_STREAMS = 256

OUR_KINDS: tuple[Kind, ...] = ("one after another", "in turns", "at once")


def streams_contender(kind: Kind, lookahead: Lookahead) -> Contender:
    """Several streams of this runtime."""
    name = f"outrider {kind}" + ("" if lookahead == "auto" else f", lookahead {lookahead}")
    return Contender("outrider", lookahead, kind, named=name)


@attrs.frozen(kw_only=True)
class StreamsPlan(Plan):
    """What to measure.

    Attributes:
        prompts: one a stream; more streams than prompts begin again with the first prompt.
        streams: numbers of streams, each in [1, 256].
        lookaheads: of this runtime's streams, each in [0, 64] or "auto"; each has a runtime of its own.
    """

    prompts: tuple[BenchPrompt, ...] = attrs.field(default=STREAM_PROMPTS, converter=bench_prompts)
    streams: tuple[int, ...] = attrs.field(
        default=(1, 2, 4, 8, 16), converter=without_repeats, validator=validator(check_integers, 1, MAX_STREAMS)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=("auto",),
        converter=without_repeats,
        validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True),
    )
    kinds: tuple[Kind, ...] = OUR_KINDS

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.kv_bits is not None:
            raise SettingsError(
                "kv_bits is not for many streams: mlx-lm's BatchGenerator cannot quantise caches; leave it out"
            )

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All contenders. For each lookahead, the baselines of "at once" come first."""
        return (*(streams_contender(kind, each) for each in self.lookaheads for kind in self.kinds), BATCHED)


def _versus(kind: Kind) -> Callable[[Entry], float | None]:
    """The median over that of the same streams decoded in another way; None for mlx-lm."""
    return lambda entry: (
        None if entry.contender == BATCHED else entry.versus(streams_contender(kind, entry.contender.lookahead))
    )


def _first_token(entry: Entry) -> float | None:
    """The median time to a first token; with streams one after another it includes the earlier streams."""
    firsts = [first for run in entry.runs.values() for first in run.first_tokens]
    return statistics.median(firsts) if firsts else None


def _most(name: str) -> Callable[[Entry], Any]:
    return lambda entry: max((getattr(run, name) for run in entry.runs.values()), default=None)


class ManyStreams(Benchmark[StreamsPlan]):
    """Speeds are tokens of all streams per second, from the call to the last token, prompts included."""

    figures = (
        Figure("streams", lambda entry: entry.cases[0], "streams", "d"),
        attrs.evolve(
            LABEL,
            show=lambda row: (
                row.name.removeprefix("outrider ").removeprefix("mlx-lm ").replace("one after another", "one by one")
            ),
        ),
        Figure("kind", lambda entry: entry.contender.kind),
        LOOKAHEAD,
        *spread_figures("speeds", "tokens/s"),
        Figure("vs_one_after_another", _versus("one after another"), "× one\nby one", ".2f"),
        Figure("vs_in_turns", _versus("in turns"), "× in\nturns", ".2f"),
        Figure("vs_batched", lambda entry: entry.versus(BATCHED), "×\nbatched", ".2f"),
        # Streams in a forward pass of the target that verifies or decodes.
        Figure("rows_per_pass", share("pass_rows", "passes"), "streams\na pass", ".2f"),
        Figure("first_token", _first_token, "first", lambda row: seconds_text(row.first_token)),
        Figure("longest_wait", _most("longest_wait"), "longest\nwait", lambda row: seconds_text(row.longest_wait)),
        # Caches and passes, and not the weights.
        Figure("peak_bytes", _most("peak_bytes"), "memory", lambda row: bytes_text(row.peak_bytes)),
        *SAME_TEXTS,
        *BUSY,
        TOKENS_PER_ROUND,
        Figure("proposal", share("proposed", "rounds"), "proposed", ".2f"),
        Figure("acceptance", share("accepted", "proposed"), "accepted", ".0%"),
        HIT_RATE,
        # Draft steps: the cost of drafting.
        Figure("drafted_per_token", share("drafted", "num_tokens"), "drafted", ".2f"),
        FAILURE,
    )

    def __init__(self, plan: StreamsPlan) -> None:
        super().__init__(plan)
        self.alone: list[tuple[int, ...]] = []

    def _contest(self) -> Contest[Contender, int, Run]:
        plan = self.plan
        warm_up = [min(2, max(plan.streams))]
        return Contest(plan.contenders, plan.streams, plan.repeats, warm_up=warm_up, size=float)

    def _prompts_of(self, case: int, prompts: Prompts) -> Prompts:
        return [prompts[n % len(prompts)] for n in range(case)]

    def _described(self, case: int) -> str:
        return "1 stream" if case == 1 else f"{case} streams"

    def expected(self, entry: Entry, case: int) -> Sequence[tuple[int, ...]]:
        """The text that each prompt has alone."""
        return self._prompts_of(case, self.alone)

    def result(self) -> Record:
        rows = [row for streams in self.plan.streams for row in self.rows([streams])]
        return Record(**self._facts_of_models(), streams=self.plan.streams, rows=rows)

    def report(self, result: Record) -> Report:
        return Report(
            table_of(
                self.figures, result.rows, is_bold=lambda row: row.kind == "at once", num_labels=2, is_grouped=True
            ),
            about=[("bench", list(about_models(result, "each")))],
            notes=[*_NOTES, *failures(result)],
        )

    def plot(self, result: Record) -> Plot:
        def label(row: Record) -> str:
            return f"{self._described(row.streams)}, {row.name}"

        return speeds_plot(result, "tokens of all streams per second", label, lambda row: row.kind == "at once")

    async def measure(self, target: Source, draft: Source, *, on_progress: Progress = lambda _: None) -> Record:
        """Have all contenders decode all numbers of streams, in turn. It raises what `OneStream.measure` does."""
        return await self._measure(target, {ONLY_DRAFT: draft}, on_progress)

    async def _prepare(
        self, runner: ContenderRunner, models: LoadedModels, first_turns: Prompts, on_progress: Progress
    ) -> Prompts:
        plan, prompts = self.plan, first_turns[: max(self.plan.streams)]
        for number, prompt in enumerate(prompts, start=1):
            on_progress(f"decoding the reference texts plainly ({number} of {len(prompts)})")
            try:
                run = await runner.run(PLAIN, [prompt], plan.max_tokens, plan.temperature, with_prompts=True)
            except JobError as error:
                raise plain_failed(error) from error.__cause__
            self.alone += run.texts
        return prompts


_NOTES = (
    "Speeds are tokens of all streams per second, from the call to the last token, prompts included: medians over "
    "repeats, with the slowest and the fastest. × one by one: over the same streams one after another on the same "
    "runtime. × in turns: over the same streams at once with max_batch=1, each in passes of its own. × batched: "
    "over mlx-lm's BatchGenerator, which cannot speculate.",
    "streams a pass: mean number of streams that shared a pass of the target. first: median time from the call to "
    "a stream's first token. longest wait: longest time between two tokens of a stream. memory: most that MLX held "
    "at once, beyond what it held before, so without the weights. same: texts equal to mlx-lm's plain decoding of "
    "the prompt alone.",
    "busy: share of the time in which the target's and the drafter's threads worked. a round: tokens committed by "
    "a round of one stream. proposed: tokens proposed for it. hits: verdicts whose text had been drafted ahead. "
    "drafted: draft steps per token.",
)
