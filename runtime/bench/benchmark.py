"""What all benchmarks share: the plan, the measuring, and the figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import attrs
import trio

from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.workers.worker import JobError
from protocol.errors import ModelError, PromptError
from protocol.open_options import OpenOptions
from protocol.settings import settings_from
from protocol.validation import check_integer, check_number, must_be, validator
from runtime.bench.contenders import PLAIN, Contender, ContenderRunner, Prompts, Run
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.loading.demo import DEMO_PROMPTS
from runtime.loading.model_sources import Source, caches_of
from runtime.measuring.contest import Contest
from runtime.measuring.figures import Figure, Record, Spread, ratio, record_of, spread, total
from runtime.measuring.loaded_models import Circumstances, LoadedModels, load_models
from runtime.measuring.plots import Bar, Plot
from runtime.measuring.reports import Report

DTYPES = ("float32", "bfloat16", "float16")

# A closing run below this fraction of the first speed shows that the machine became slower; above, it may be noise.
MIN_CLOCK = 0.9

# Enough to leave something to time after the first round.
MIN_TOKENS = 16


def without_repeats(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values in order, each once."""
    return tuple(dict.fromkeys(values))


@attrs.frozen(kw_only=True)
class Plan:
    """What to measure: the options that all benchmarks share.

    Raises: SettingsError, PromptError: something is out of its range.

    Attributes:
        prompts: texts, sequences of token ids, or `BenchPrompt`; at least one.
        max_tokens: number of tokens to generate for each prompt, >= 16; nothing ends a text earlier.
        cooldown: seconds of rest before each run: a machine that is hot may be slower, without a warning.
        dtype: "float32", "bfloat16" or "float16": the loaded models are cast to it; None leaves them as they are.
        rewind, kv_bits, kv_group_size, quantized_kv_start: as for `runtime.open`; mlx-lm quantises its caches in the
            same way.
    """

    prompts: tuple[BenchPrompt, ...] = attrs.field(default=DEMO_PROMPTS, converter=bench_prompts)
    max_tokens: int = attrs.field(default=96, validator=validator(check_integer, MIN_TOKENS))
    repeats: int = attrs.field(default=3, validator=validator(check_integer, 1))
    cooldown: float = attrs.field(default=0.0, validator=validator(check_number, 0))
    temperature: float = attrs.field(default=0.0, validator=lambda _, __, value: settings_from({"temperature": value}))
    dtype: str | None = attrs.field(default=None)
    rewind: str = "auto"
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000

    def __attrs_post_init__(self) -> None:
        _ = self.cache_options

    @property
    def cache_options(self) -> CacheOptions:
        """Options of the runtime's caches."""
        names = ("rewind", "kv_bits", "kv_group_size", "quantized_kv_start")
        return caches_of(OpenOptions(**{name: getattr(self, name) for name in names}))

    @prompts.validator
    def _check_prompts(self, _: object, prompts: tuple[Any, ...]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to measure with; give at least one")

    @dtype.validator
    def _check_dtype(self, _: object, dtype: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise must_be("dtype", f"one of {', '.join(DTYPES)} or None", dtype)


P = TypeVar("P", bound=Plan)
Progress = Callable[[str], None]


class Benchmark(ABC, Generic[P]):
    """A benchmark, and what it has measured so far; `result` may be called at any time.

    A case is a number: the index of a prompt's turn, or a number of streams.

    Attributes:
        closing: the first contender's first case, run again after all others; shows whether the machine became slower.
        prefix_cache_bytes: of the runtimes. With 0, no prompt is cached from an earlier run: mlx-lm's batches read all
            of them, too.
    """

    figures: ClassVar[tuple[Figure, ...]]  # of each row, for JSON and the table
    with_prompts: ClassVar[bool] = True  # whether the time of the prompts counts
    is_a_time: ClassVar[bool] = False  # whether the compared value is a time, so that less is better
    prefix_cache_bytes: ClassVar[int] = 0

    def __init__(self, plan: P) -> None:
        self.plan = plan
        self.about = Circumstances()
        self.contest = self._contest()
        self.closing: Run | None = None

    # --- what each benchmark decides --------------------------------------------------------------

    @abstractmethod
    def _contest(self) -> Contest[Contender, int, Run]:
        """The contest that the plan describes, without runs."""

    @abstractmethod
    def _prompts_of(self, case: int, prompts: Prompts) -> Prompts:
        """The prompts that are decoded in a case."""

    @abstractmethod
    def _described(self, case: int) -> str:
        """A case in a progress line."""

    @abstractmethod
    def result(self) -> Record:
        """The figures so far, and what they were measured on. `rows` has a record for each contender."""

    @abstractmethod
    def report(self, result: Record) -> Report:
        """The report of a result, to be printed."""

    def plot(self, result: Record) -> Plot:
        """The speeds of a result, to be drawn."""
        raise NotImplementedError

    def expected(self, entry: Entry, case: int) -> Sequence[tuple[int, ...]]:
        """The texts that a case should have."""
        return ()

    def value(self, runs: Sequence[Run]) -> float | None:
        """The value to compare: here tokens per second."""
        return ratio(total(runs, "num_timed"), total(runs, "seconds"))

    # --- figures ----------------------------------------------------------------------------------

    def entries(self, cases: Sequence[int]) -> list[Entry]:
        """What the rows of some cases are computed from: one for each contender that takes part in them."""
        complete = {key: turn for key, turn in self.contest.complete.items() if key[1] in cases}
        return [Entry(self, complete, contender, cases) for contender in self.contest.contenders_of(cases[0])]

    def rows(self, cases: Sequence[int]) -> list[Record]:
        """The figures of some cases: a row for each contender that takes part in them."""
        return [record_of(self.figures, entry) for entry in self.entries(cases)]

    def _facts(self) -> dict[str, Any]:
        return {
            "machine": self.about.machine,
            "max_tokens": self.plan.max_tokens,
            "repeats": self.plan.repeats,
            "repeats_done": self.contest.repeats_done,
            "is_complete": self.contest.is_complete,
            "clock": self._clock(),
        }

    def _clock(self) -> float | None:
        """The first contender's speed in the closing run, over its median before; None without a closing run."""
        entry = next(iter(self.entries(self.contest.cases[:1])))
        if self.closing is None:
            return None
        before, after = entry.spread.median, self.value([self.closing])
        return ratio(before, after) if self.is_a_time else ratio(after, before)

    def _facts_of_models(self) -> dict[str, Any]:
        about = self.about
        models = {"target": about.target, "draft": about.draft, "dtypes": about.dtypes}
        return models | self._facts() | {"temperature": self.plan.temperature}

    # --- measuring --------------------------------------------------------------------------------

    async def _measure(
        self, target: Source, drafts: Mapping[str, Source], on_progress: Progress, group: RankGroup | None = None
    ) -> Record:
        async with AsyncExitStack() as stack:
            plan = self.plan
            models = await load_models(
                stack, target, drafts, plan.cache_options, dtype=plan.dtype, group=group, on_progress=on_progress
            )
            self.about = models.circumstances
            has_template = bool(getattr(models.tokenizer, "has_chat_template", False))
            first_turns = [prompt.at(0, (), has_template=has_template) for prompt in plan.prompts]
            encoded = models.encoded(first_turns, plan.max_tokens)
            runner = ContenderRunner(models)
            self._note_models(models)
            await runner.open_runtimes(stack, self.contest.contenders, prefix_cache_bytes=self.prefix_cache_bytes)
            prompts = await self._prepare(runner, models, encoded, on_progress)
            await self._run(runner, prompts, on_progress)
        return self.result()

    def _note_models(self, models: LoadedModels) -> None:
        """Called once the models are loaded, before the contest begins."""

    async def _prepare(
        self, runner: ContenderRunner, models: LoadedModels, first_turns: Prompts, on_progress: Progress
    ) -> Prompts:
        """Called before the contest begins. Returns: the prompts as token ids; here the first turns alone."""
        return first_turns

    async def _run(self, runner: ContenderRunner, prompts: Prompts, on_progress: Progress) -> None:
        plan = self.plan
        for step in self.contest.steps():
            repeat = "" if step.repeat is None else f"repeat {step.repeat + 1} of {plan.repeats}, "
            when = f"{repeat}{self._described(step.case)}" if repeat else "warming up"
            on_progress(f"{when}: {step.contender.name} ({step.progress})")
            try:
                run = await self._run_one(runner, step.contender, self._prompts_of(step.case, prompts))
            except JobError as error:
                if step.contender == PLAIN:
                    raise plain_failed(error) from error.__cause__
                self.contest.fail(step, str(error.__cause__))
            else:
                self.contest.record(step, run)
        first = self.contest.contenders[0]
        if first not in self.contest.failures:
            on_progress(f"closing: {first.name} again")
            try:
                self.closing = await self._run_one(runner, first, self._prompts_of(self.contest.cases[0], prompts))
            except JobError as error:
                raise plain_failed(error) from error.__cause__

    async def _run_one(self, runner: ContenderRunner, contender: Contender, prompts: Prompts) -> Run:
        plan = self.plan
        await trio.sleep(plan.cooldown)
        return await runner.run(contender, prompts, plan.max_tokens, plan.temperature, with_prompts=self.with_prompts)


def plain_failed(error: JobError) -> ModelError:
    """The error when plain decoding fails. It ends a benchmark, since everything is compared with plain decoding."""
    return ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}")


@attrs.frozen
class Entry:
    """What a row's figures are computed from: a contender, and the complete turns of some cases."""

    benchmark: Benchmark[Any]
    complete: Mapping[tuple[int, int], Mapping[Contender, Run]]
    contender: Contender
    cases: Sequence[int]

    @property
    def runs(self) -> dict[tuple[int, int], Run]:
        """The contender's runs, by (repeat, case)."""
        return {key: turn[self.contender] for key, turn in self.complete.items() if self.contender in turn}

    @property
    def spread(self) -> Spread:
        """The compared value: one for each repeat, over the cases."""
        by_repeat: dict[int, list[Run]] = {}
        for (repeat, _), run in self.runs.items():
            by_repeat.setdefault(repeat, []).append(run)
        return spread(self.benchmark.value(runs) for runs in by_repeat.values())

    def total(self, *names: str) -> float | None:
        """The sum of counters over the runs."""
        return total(list(self.runs.values()), *names)

    def by(self, other: Contender) -> Entry:
        """The entry of another contender, with the same cases."""
        return attrs.evolve(self, contender=other)

    def versus(self, other: Contender | None) -> float | None:
        """Its median over that of another contender."""
        return None if other is None else ratio(self.spread.median, self.by(other).spread.median)

    def same_texts(self) -> int | None:
        """Number of texts that equal the expected ones; None above temperature 0.

        In low precision a pass of another width, or over more texts, may decide a near-tie differently.
        """
        expected = {case: self.benchmark.expected(self, case) for _, case in self.complete}
        pairs = (pair for (_, case), run in self.runs.items() for pair in zip(run.texts, expected[case], strict=True))
        return None if self.benchmark.plan.temperature > 0 else sum(text == should for text, should in pairs)


# --- figures that several benchmarks have ---------------------------------------------------------


def share(part: str, *whole: str) -> Callable[[Entry], float | None]:
    """The ratio of two counters of `Run`, or of one and the sum of others."""
    return lambda entry: ratio(entry.total(part), entry.total(*whole))


def spread_figures(name: str, heading: str) -> tuple[Figure, ...]:
    """Figures of the compared value; `name` has one value for each repeat."""
    return (
        Figure(name, lambda entry: entry.spread.values),
        Figure("median", lambda entry: entry.spread.median, heading, ".1f"),
        Figure("low", lambda entry: entry.spread.low),
        Figure("high", lambda entry: entry.spread.high),
        Figure(heading="spread", show=lambda row: f"{row.low:.1f}–{row.high:.1f}"),
    )


LABEL = Figure("name", lambda entry: entry.contender.name, "")
LOOKAHEAD = Figure("lookahead", lambda entry: entry.contender.lookahead)
FAILURE = Figure("failure", lambda entry: entry.benchmark.contest.failures.get(entry.contender))
TOKENS_PER_ROUND = Figure("tokens_per_round", share("num_tokens", "rounds"), "a round", ".2f")
# Share of verdicts whose text had been drafted ahead.
HIT_RATE = Figure("hit_rate", share("hits", "hits", "misses"), "hits", ".0%")


def _busy(row: Record) -> list[float | None]:
    return [row.target_busy] if row.target_busy is None else [row.target_busy, row.draft_busy]


# The fraction of the time in which each model's thread worked; None for a drafter that took no step.
BUSY = (
    Figure("target_busy", share("target_seconds", "seconds")),
    Figure("draft_busy", lambda entry: share("draft_seconds", "seconds")(entry) if entry.total("drafted") else None),
    Figure(
        heading="busy",
        show=lambda row: " ".join("–" if each is None else f"{each:.0%}" for each in _busy(row)),
    ),
)
SAME_TEXTS = (
    Figure("same_texts", Entry.same_texts),
    Figure("num_texts", lambda entry: sum(len(run.texts) for run in entry.runs.values())),
    Figure(heading="same", show=lambda row: "–" if row.same_texts is None else f"{row.same_texts}/{row.num_texts}"),
)


def about_models(result: Record, num_texts: int | str) -> Iterator[tuple[str, str]]:
    """Models, texts, repeats and machine, as rows of (name, value)."""
    yield "target", f"{result.target}, {', '.join(result.dtypes['target'])}"
    yield "draft", ", ".join([result.draft, *result.dtypes.get("draft", ())])
    for name, dtypes in result.dtypes.items():
        if name not in ("target", "draft"):
            yield "", f"{name}: {', '.join(dtypes)}"
    yield "texts", f"{num_texts} of {result.max_tokens} tokens, temperature {result.temperature:g}"
    cut = "" if result.is_complete else ", the last perhaps in part: it was interrupted"
    yield "repeats", f"{result.repeats_done} of {result.repeats}{cut}"
    yield from result.machine.items()


def failures(result: Record) -> Iterator[str]:
    """Which contenders cannot run, and why; and whether the machine became slower."""
    if result.clock is not None and result.clock < MIN_CLOCK:
        yield (
            f"The machine slowed down during the run: at the end the first row had {result.clock:.2f} times its speed. "
            "Do not compare figures of this run with another."
        )
    for name, why in dict.fromkeys((row.name, row.failure) for row in result.rows if row.failure is not None):
        yield f"{name} cannot run: {why}"


def speeds_plot(
    result: Record, unit: str, label: Callable[[Record], str], stands_out: Callable[[Record], bool]
) -> Plot:
    """A bar for each row that has a speed."""

    def bar(row: Record) -> Bar:
        over_plain = getattr(row, "vs_plain", None)
        text = f"{row.median:.1f}" if over_plain is None else f"{row.median:.1f} ({over_plain:.2f}×)"
        return Bar(label(row), row.median, row.low, row.high, text, stands_out(row))

    return Plot(
        f"{Path(result.target).name} with {Path(result.draft).name}, {result.machine.get('processor', '')}",
        f"{unit}: median, slowest and fastest repeat",
        [bar(row) for row in result.rows if row.median is not None],
    )
