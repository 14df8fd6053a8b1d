"""The benchmark of the runtime itself: what it adds to a token, with a model so small that nothing else counts.

It is compared with mlx-lm's bare loops: `generate_step` for one stream, and `BatchGenerator`. The drafter has other
weights than the target, so that nearly every drafted token is rejected and each token costs a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from mlx.nn.layers.base import Module

from protocol.validation import check_integers, validator
from runtime.bench.benchmark import FAILURE, Benchmark, Plan, Progress, failures, spread_figures, without_repeats
from runtime.bench.contenders import BATCHED, Contender, Prompts, Run
from runtime.bench.many_streams import MAX_STREAMS
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.bench.small_models import VOCAB_SIZE, small_model
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Figure, Record, ratio, table_of, total
from runtime.measuring.loaded_models import ONLY_DRAFT
from runtime.measuring.reports import Report

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


@attrs.frozen(kw_only=True)
class OverheadPlan(Plan):
    """What to measure: short prompts, greedily; `streams` are numbers of streams at once, each in [1, 256]."""

    prompts: tuple[BenchPrompt, ...] = attrs.field(default=PROMPTS, converter=bench_prompts, init=False)
    max_tokens: int = attrs.field(default=128, validator=attrs.fields(Plan).max_tokens.validator)
    streams: tuple[int, ...] = attrs.field(
        default=(1, 4, 16, 64), converter=without_repeats, validator=validator(check_integers, 1, MAX_STREAMS)
    )


class Overhead(Benchmark[OverheadPlan]):
    """Figures are microseconds for a token of all streams, from the call to the last token."""

    is_a_time = True
    figures = (
        Figure("streams", lambda entry: entry.cases[0], "streams", "d"),
        Figure("way", lambda entry: entry.contender.name, "", "s"),
        *spread_figures("microseconds", "µs a token"),
        # Over `generate_step` for one stream, else over `BatchGenerator`.
        Figure(
            "vs_mlx_lm",
            lambda entry: entry.versus(STEP_BY_STEP if entry.cases[0] == 1 else BATCHED),
            "× mlx-lm",
            ".2f",
        ),
        FAILURE,
    )

    def _contest(self) -> Contest[Contender, int, Run]:
        plan = self.plan
        return Contest(
            CONTENDERS,
            plan.streams,
            plan.repeats,
            warm_up=plan.streams,
            takes_part=lambda contender, streams: streams == 1 or contender != STEP_BY_STEP,
        )

    def _prompts_of(self, case: int, prompts: Prompts) -> Prompts:
        return prompts[:case]

    def _described(self, case: int) -> str:
        return f"{case} at once"

    def value(self, runs: Sequence[Run]) -> float | None:
        seconds = ratio(total(runs, "seconds"), total(runs, "num_timed"))
        return None if seconds is None else 1e6 * seconds

    def result(self) -> Record:
        return Record(**self._facts(), rows=[row for streams in self.plan.streams for row in self.rows([streams])])

    def report(self, result: Record) -> Report:
        about = [
            ("texts", f"of {result.max_tokens} tokens, greedy, after short prompts"),
            ("repeats", f"{result.repeats_done} of {result.repeats}"),
            *result.machine.items(),
        ]
        note = (
            "Microseconds a token of all streams, from the call to the last token: medians over repeats, with the "
            "fastest and the slowest. The model has one layer of width 32, so that nearly all of this is Python. × "
            "mlx-lm: over generate_step for one stream, over BatchGenerator for more."
        )
        table = table_of(self.figures, result.rows, num_labels=2, is_grouped=True)
        return Report(table, about=[("bench", about)], notes=[note, *failures(result)])

    async def measure(self, *, on_progress: Progress = lambda _: None) -> Record:
        """Have every contender decode every number of streams, in turn. Cancelled, `result` has what was measured."""
        return await self._measure((smallest_model(0), None), {ONLY_DRAFT: (smallest_model(1), None)}, on_progress)


def smallest_model(seed: int) -> Module:
    """A language model whose passes take hardly any time, evaluated on this thread."""
    return small_model("llama", seed, num_hidden_layers=1, hidden_size=32, intermediate_size=64, head_dim=16)
