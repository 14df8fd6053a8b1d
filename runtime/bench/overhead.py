"""The benchmark of the runtime itself: what it adds to a token, with a model so small that nothing else counts.

It is compared with mlx-lm's bare loops: `generate_step` for one stream, and `BatchGenerator`. The drafter has other
weights than the target, so that nearly every drafted token is rejected and each token costs a round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from runtime.bench import figures
from runtime.bench.benchmark import Benchmark, Case, Cases, OnProgress, integers
from runtime.bench.contenders import BATCHED, Contender, Length, PromptIds, Run
from runtime.bench.figures import Report, TableRow, column
from runtime.bench.loaded_models import LoadedModels
from runtime.bench.many_streams import MAX_STREAMS
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.bench.small_models import VOCAB_SIZE, small_model
from runtime.loading.model_sources import ModelSource

NUM_PROMPT_TOKENS = 8
PROMPTS = tuple(
    tuple((7 * stream + 3 * i) % VOCAB_SIZE for i in range(NUM_PROMPT_TOKENS)) for stream in range(MAX_STREAMS)
)

STEP_BY_STEP = Contender("mlx-lm", 0, named="mlx-lm generate_step")
CONTENDERS = (
    STEP_BY_STEP,
    BATCHED,
    # This runtime without a drafter, with one that rests since it does not pay, and with a fixed lookahead.
    Contender("outrider", 0, "at once", named="outrider plain"),
    Contender("outrider", "auto", "at once", named="outrider resting"),
    Contender("outrider", 2, "at once", named="outrider lookahead 2"),
)


@attrs.define(kw_only=True, eq=False)
class Overhead(Benchmark):
    """Figures are microseconds for a token of all streams, from the call to the last token.

    Short prompts are continued greedily; `streams` are numbers of streams at once, each in [1, 256].
    """

    prompts: tuple[BenchPrompt, ...] = attrs.field(default=PROMPTS, converter=bench_prompts, init=False)
    max_tokens: int = attrs.field(default=128, validator=attrs.fields(Benchmark).max_tokens.validator)
    streams: tuple[int, ...] = integers((1, 4, 16, 64), 1, MAX_STREAMS)
    contenders: Sequence[Contender] = attrs.field(init=False, default=CONTENDERS)

    async def measure(self, *_: ModelSource, on_progress: OnProgress = lambda _: None, **__: object) -> dict[str, Any]:
        """Have every contender decode every number of streams, in turn, with models of its own."""
        # Their passes take hardly any time.
        shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
        target, draft = ((small_model("llama", seed, **shape), None) for seed in range(2))
        return await super().measure(target, draft, on_progress=on_progress)

    async def _prepare(self, models: LoadedModels, prompts: PromptIds, on_progress: OnProgress) -> Cases:
        length = Length(self.max_tokens)
        cases = [Case(f"{n} at once", contenders_of(n), prompts[:n], length) for n in self.streams]
        return cases, cases

    def value(self, runs: Sequence[Run]) -> float | None:
        seconds = figures.ratio(sum(run.seconds for run in runs), sum(run.num_timed for run in runs))
        return None if seconds is None else 1e6 * seconds

    def result(self) -> dict[str, Any]:
        streams = enumerate(self.streams)
        rows = [self._row(contender, index, n) for index, n in streams for contender in contenders_of(n)]
        return {**self._facts(), "rows": rows}

    def _row(self, contender: Contender, index: int, streams: int) -> TableRow:
        values = self.values(contender, [index])
        return {
            "streams": streams,
            "name": contender.name,
            "microseconds": values,
            **figures.spread(values),
            # Over `generate_step` for one stream, else over `BatchGenerator`.
            "vs_mlx_lm": self.versus(contender, contenders_of(streams)[0], [index]),
            "failure": self.failures.get(contender),
        }

    def report(self, result: Mapping[str, Any]) -> Report:
        about = [
            ("texts", f"of {result['max_tokens']} tokens, greedy, after short prompts"),
            *figures.about_run(result),
        ]
        note = (
            "Microseconds a token of all streams, from the call to the last token: medians over repeats, with the "
            "fastest and the slowest. The model has one layer of width 32, so that nearly all of this is Python. × "
            "mlx-lm: over generate_step for one stream, over BatchGenerator for more."
        )
        columns = (
            column("streams", "streams"),
            column("", "name"),
            ("µs a token", figures.spread_cell),
            column("× mlx-lm", "vs_mlx_lm", ".2f"),
        )
        table = figures.table(result["rows"], columns, num_labels=2)
        return Report([("bench", about)], [("Figures", table)], [note, *figures.failures(result)])


def contenders_of(streams: int) -> list[Contender]:
    """Those that decode a number of streams: `generate_step` decodes one."""
    return [each for each in CONTENDERS if streams == 1 or each != STEP_BY_STEP]
