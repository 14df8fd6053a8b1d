"""The benchmark of many streams: the same prompts at once on one runtime, one after another on it, at once without
sharing passes, and in mlx-lm's `BatchGenerator`, which decodes several prompts in one pass but cannot speculate.

Compare only ratios within one such benchmark.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.settings import MAX_LOOKAHEAD
from runtime.bench import figures
from runtime.bench.benchmark import Benchmark, Case, Cases, OnProgress, integers
from runtime.bench.contenders import BATCHED, PLAIN, Contender, Length, Lookahead, PromptIds, StreamsMode
from runtime.bench.figures import Report, TableRow, column
from runtime.bench.loaded_models import LoadedModels
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.loading.demo import STREAM_PROMPTS

MAX_STREAMS = 256

# Ways of this runtime, as tables name them.
OUR_KINDS: dict[StreamsMode, str] = {"one after another": "one by one", "in turns": "in turns", "at once": "at once"}


def streams_contender(kind: StreamsMode, lookahead: Lookahead) -> Contender:
    """Several streams of this runtime."""
    name = f"outrider {kind}" + ("" if lookahead == "auto" else f", lookahead {lookahead}")
    return Contender("outrider", lookahead, kind, named=name)


@attrs.define(kw_only=True, eq=False)
class ManyStreams(Benchmark):
    """Speeds are tokens of all streams per second, from the call to the last token, prompts included.

    Attributes:
        prompts: one a stream; more streams than prompts begin again with the first prompt.
        streams: numbers of streams, each in [1, 256].
        lookaheads: of this runtime's streams, each in [0, 64] or "auto"; each has a runtime of its own.
    """

    prompts: tuple[BenchPrompt, ...] = attrs.field(default=STREAM_PROMPTS, converter=bench_prompts)
    streams: tuple[int, ...] = integers((1, 2, 4, 8, 16), 1, MAX_STREAMS)
    lookaheads: tuple[Lookahead, ...] = integers(("auto",), 0, MAX_LOOKAHEAD, or_auto=True)

    def __attrs_post_init__(self) -> None:
        if self.cache_options.kv_bits is not None:
            raise SettingsError(
                "kv_bits is not for many streams: mlx-lm's BatchGenerator cannot quantise caches; leave it out"
            )
        # For each lookahead, the baselines of "at once" come first.
        self.contenders = [*(streams_contender(kind, each) for each in self.lookaheads for kind in OUR_KINDS), BATCHED]

    async def _prepare(self, models: LoadedModels, prompts: PromptIds, on_progress: OnProgress) -> Cases:
        """A case for each number of streams, whose texts should be those of mlx-lm's plain decoding."""
        length, alone = Length(self.max_tokens, self.temperature), list[tuple[int, ...]]()
        prompts = prompts[: max(self.streams)]
        for number, prompt in enumerate(prompts, start=1):
            on_progress(f"decoding the reference texts plainly ({number} of {len(prompts)})")
            alone += (await models.run(PLAIN, [prompt], length)).texts

        def case(streams: int) -> Case:
            name = "1 stream" if streams == 1 else f"{streams} streams"
            asked, expected = (list(islice(cycle(each), streams)) for each in (prompts, alone))
            return Case(name, self.contenders, asked, length, expected)

        return [case(min(2, max(self.streams)))], list(map(case, self.streams))

    def result(self) -> dict[str, Any]:
        """See `Benchmark.result`; there is a row for each contender and number of streams."""
        rows = [self._row(contender, index) for index in range(len(self.streams)) for contender in self.contenders]
        return {**self._facts(), "streams": list(self.streams), "rows": rows}

    def _row(self, contender: Contender, index: int) -> TableRow:
        runs = self.runs(contender, [index]).values()

        def versus(kind: StreamsMode) -> float | None:
            other = streams_contender(kind, contender.lookahead)
            return None if contender == BATCHED else self.versus(contender, other, [index])

        return {
            **self.speed_row(contender, [index]),
            "streams": self.streams[index],
            "kind": contender.kind,
            "vs_one_after_another": versus("one after another"),
            "vs_in_turns": versus("in turns"),
            "vs_batched": self.versus(contender, BATCHED, [index]),
            "rows_per_pass": figures.share(runs, "pass_rows", "passes"),
            "first_token": figures.median([first for run in runs for first in run.first_tokens]),
        }

    def report(self, result: Mapping[str, Any]) -> Report:
        tables = [("Figures", figures.table(result["rows"], _FIGURES, num_labels=2))]
        sections = [("bench", list(figures.about_models(result, "each")))]
        return Report(sections, tables, [_NOTE, *figures.failures(result)])


def _way(row: TableRow) -> str:
    if row["kind"] == "batched":
        return "batched"
    return OUR_KINDS[row["kind"]] + ("" if row["lookahead"] == "auto" else f", lookahead {row['lookahead']}")


_FIGURES = (
    column("streams", "streams"),
    ("", _way),
    ("tokens/s", figures.spread_cell),
    column("× one\nby one", "vs_one_after_another", ".2f"),
    column("× in\nturns", "vs_in_turns", ".2f"),
    column("×\nbatched", "vs_batched", ".2f"),
    column("streams\na pass", "rows_per_pass", ".2f"),
    ("first\ntoken", lambda row: "–" if row["first_token"] is None else f"{row['first_token'] * 1e3:.0f} ms"),
    ("same", figures.same_cell),
)
_NOTE = (
    "Speeds are tokens of all streams per second, from the call to the last token, prompts included: medians over "
    "repeats, with the slowest and the fastest. × one by one: over the same streams one after another on the same "
    "runtime. × in turns: over the same streams at once with max_batch=1, each in passes of its own. × batched: over "
    "mlx-lm's BatchGenerator, which cannot speculate. streams a pass: mean number of streams that shared a pass of the "
    "target. first token: median time from the call. same: texts equal to mlx-lm's plain decoding of the prompt alone."
)
