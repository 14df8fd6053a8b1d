"""What the benchmarks share: what to measure, contenders that take turns, and figures with their spread."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeVar

import attrs

from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.workers.worker import JobError
from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown
from protocol.settings import settings_from
from protocol.validation import check_integer, check_integers, must_be, validator
from runtime.bench import figures
from runtime.bench.contenders import Contender, Length, PromptIds, Run
from runtime.bench.figures import Report, TableRow
from runtime.bench.loaded_models import ONLY_DRAFT, TARGET, LoadedModels, load_models
from runtime.bench.prompt_files import BenchPrompt, bench_prompts
from runtime.loading.demo import DEMO_PROMPTS
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import ModelSource

DTYPES = ("float32", "bfloat16", "float16")

# Enough to leave something to time after the first round.
MIN_TOKENS = 16

T = TypeVar("T")
OnProgress = Callable[[str], None]


def without_repeats(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values in order, each once."""
    return tuple(dict.fromkeys(values))


def integers(default: tuple[Any, ...], lowest: int, highest: int, *, or_auto: bool = False) -> Any:
    """A field for whole numbers in a range, each once."""
    checked = validator(check_integers, lowest, highest, or_auto=or_auto)
    return attrs.field(default=default, converter=without_repeats, validator=checked)


@attrs.frozen
class Case:
    """What contenders decode in one turn; their texts are compared with `expected`, else with the first one's."""

    name: str  # in a progress line
    contenders: Sequence[Contender]
    prompts: PromptIds
    length: Length
    expected: Sequence[tuple[int, ...]] | None = None


Cases = tuple[list[Case], list[Case]]  # those that warm up, and those that are measured


@attrs.define(kw_only=True, eq=False)
class Benchmark(ABC):
    """A benchmark: what to measure, and what it has measured so far; `result` may be called at any time.

    Contenders take turns on the same cases, so that disturbances of the machine hit all of them alike.

    Attributes:
        prompts: texts, sequences of token ids, or `BenchPrompt`; at least one.
        max_tokens: tokens to generate for each prompt, >= 16.
        dtype: "float32", "bfloat16" or "float16": the loaded models are cast to it; None leaves them as they are.
        cache_options: of the runtimes' caches; mlx-lm's caches are quantised alike.
        contenders: in the order of the rows.
        cases, about, draft_names: empty before the models are loaded.
        turns: runs by (repeat, index of the case); a turn that was interrupted lacks some.
        failures: why a contender cannot run. The others go on.

    Raises: SettingsError, PromptError: something is out of its range.
    """

    with_prompts: ClassVar[bool] = True  # whether the time of the prompts counts
    follows_schemas: ClassVar[bool] = False  # whether prompts may have a schema
    # Of the runtimes. No prompt is cached from an earlier run: mlx-lm's batches read all of them, too.
    prefix_cache_bytes: ClassVar[int] = 0
    prompts: tuple[BenchPrompt, ...] = attrs.field(default=DEMO_PROMPTS, converter=bench_prompts)
    max_tokens: int = attrs.field(default=96, validator=validator(check_integer, MIN_TOKENS))
    repeats: int = attrs.field(default=3, validator=validator(check_integer, 1))
    temperature: float = attrs.field(default=0.0, validator=lambda _, __, value: settings_from({"temperature": value}))
    dtype: str | None = attrs.field(default=None)
    cache_options: CacheOptions = attrs.field(factory=CacheOptions)
    contenders: Sequence[Contender] = attrs.field(init=False, factory=list)
    cases: list[Case] = attrs.field(init=False, factory=list)
    turns: dict[tuple[int, int], dict[Contender, Run]] = attrs.field(init=False, factory=dict)
    failures: dict[Contender, str] = attrs.field(init=False, factory=dict)
    about: dict[str, Any] = attrs.field(init=False, factory=dict)  # see `LoadedModels.about`
    draft_names: list[str] = attrs.field(init=False, factory=list)  # paths or hub ids

    @prompts.validator
    def _check_prompts(self, _: object, prompts: tuple[Any, ...]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to measure with; give at least one")
        if not self.follows_schemas and any(prompt.schema is not None for prompt in prompts):
            raise PromptError("a prompt with a response_format goes with --trace-acceptance only; leave the format out")

    @dtype.validator
    def _check_dtype(self, _: object, dtype: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise must_be("dtype", f"one of {', '.join(DTYPES)} or None", dtype)

    # --- what each benchmark decides --------------------------------------------------------------

    @abstractmethod
    async def _prepare(self, models: LoadedModels, prompts: PromptIds, on_progress: OnProgress) -> Cases:
        """The cases. `prompts` are the first turns."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The figures so far, and what they were measured on, as JSON values; `rows` has one for each contender."""

    @abstractmethod
    def report(self, result: Mapping[str, Any]) -> Report:
        """The report of a result."""

    def value(self, runs: Sequence[Run]) -> float | None:
        """The value to compare: here tokens per second."""
        return figures.ratio(sum(run.num_timed for run in runs), sum(run.seconds for run in runs))

    # --- figures ----------------------------------------------------------------------------------

    @property
    def complete(self) -> dict[tuple[int, int], dict[Contender, Run]]:
        """The turns in which every contender has run that can. An incomplete turn would favour some."""
        return {
            (repeat, case): turn
            for (repeat, case), turn in self.turns.items()
            if all(each in turn for each in self.cases[case].contenders if each not in self.failures)
        }

    @property
    def is_complete(self) -> bool:
        """Whether everything was measured."""
        return len(self.complete) == self.repeats * len(self.cases) > 0

    @property
    def repeats_done(self) -> int:
        """Number of repeats in the figures; the last may have only some of the cases."""
        return len({repeat for repeat, _ in self.complete})

    def runs(self, contender: Contender, cases: Sequence[int]) -> dict[tuple[int, int], Run]:
        """The runs of a contender in the complete turns of some cases, by (repeat, case)."""
        return {key: turn[contender] for key, turn in self.complete.items() if key[1] in cases and contender in turn}

    def values(self, contender: Contender, cases: Sequence[int]) -> list[float]:
        """The compared value: one for each repeat, over the cases."""
        by_repeat: dict[int, list[Run]] = {}
        for (repeat, _), run in self.runs(contender, cases).items():
            by_repeat.setdefault(repeat, []).append(run)
        return [value for runs in by_repeat.values() if (value := self.value(runs)) is not None]

    def versus(self, contender: Contender, other: Contender, cases: Sequence[int]) -> float | None:
        """A contender's median over that of another one."""
        return figures.ratio(figures.median(self.values(contender, cases)), figures.median(self.values(other, cases)))

    def same_texts(self, contender: Contender, cases: Sequence[int]) -> TableRow:
        """Numbers of texts, and of those that equal the expected ones; the latter is None above temperature 0.

        In low precision a pass of another width, or over more texts, may decide a near-tie differently.
        """
        pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for (repeat, index), run in self.runs(contender, cases).items():
            case = self.cases[index]
            expected = case.expected or self.turns[repeat, index][case.contenders[0]].texts
            pairs += zip(run.texts, expected, strict=True)
        same = None if self.temperature > 0 else sum(text == should for text, should in pairs)
        return {"same_texts": same, "num_texts": len(pairs)}

    def speed_row(self, contender: Contender, cases: Sequence[int]) -> TableRow:
        """The figures of a contender over some cases that each benchmark of streams has."""
        runs, values = self.runs(contender, cases).values(), self.values(contender, cases)
        return {
            "name": contender.name,
            "lookahead": contender.lookahead,
            "speeds": values,
            **figures.spread(values),
            "acceptance": figures.share(runs, "accepted", "accepted", "rejected"),
            "tokens_per_round": figures.ratio(sum(run.num_tokens for run in runs), figures.total(runs, "rounds")),
            "hit_rate": figures.share(runs, "lookahead_hits", "lookahead_hits", "lookahead_misses"),
            **self.same_texts(contender, cases),
            "failure": self.failures.get(contender),
        }

    def _facts(self) -> dict[str, Any]:
        names = ("max_tokens", "temperature", "repeats", "repeats_done", "is_complete")
        return {**self.about, **{name: getattr(self, name) for name in names}}

    # --- measuring --------------------------------------------------------------------------------

    async def measure(
        self,
        target: ModelSource,
        *drafts: ModelSource,
        group: RankGroup | None = None,
        on_progress: OnProgress = lambda _: None,
    ) -> dict[str, Any]:
        """Have all contenders decode all prompts, in turn.

        Args:
            target, drafts: as for `runtime.open`; at least one drafter. With prompt lookup, a trained drafter or
                another vocabulary, mlx-lm decodes plainly only.
            group: as for `runtime.open`. On ranks, mlx-lm's decoding is left out: it would have to run on all of them
                at once, and does not speculate there.
            on_progress: called with a description of each step before it starts.

        Raises:
            SettingsError: a dtype was given for models that are loaded already, or for ranks; or the group cannot be
                led.
            PromptError: a prompt cannot be encoded, or does not fit a context together with `max_tokens`.
            ModelError: a model cannot be loaded, or mlx-lm cannot decode plainly with the target.
            VocabularyMismatchError: target and draft model have different vocabularies, which cannot be translated.
            RankError: a rank has ended, hangs, differs or fails. Once something is measured, it is the cause of a
                `RuntimeBrokenError`.

        Cancellation: takes effect after the current forward passes; `result` has what was measured.
        """
        named = named_drafts(drafts) if len(drafts) > 1 else {ONLY_DRAFT: drafts[0]}
        async with AsyncExitStack() as stack:
            models = await load_models(
                stack, target, named, self.cache_options, dtype=self.dtype, group=group, on_progress=on_progress
            )
            self.about, self.draft_names = models.about(), [name_of(draft) for draft in models.drafts.values()]
            self.contenders = self._contenders_with(models)
            first_turns = [prompt.at(0, (), has_template=models.has_template) for prompt in self.prompts]
            encoded = models.encoded(first_turns, self.max_tokens)
            await models.open_runtimes(stack, self.contenders, prefix_cache_bytes=self.prefix_cache_bytes)
            warm_up, self.cases = await self._prepare(models, encoded, on_progress)
            await self._take_turns(models, warm_up, on_progress)
        return self.result()

    def _contenders_with(self, models: LoadedModels) -> Sequence[Contender]:
        return self.contenders

    async def _take_turns(self, models: LoadedModels, warm_up: Sequence[Case], on_progress: OnProgress) -> None:
        turns: list[tuple[int | None, int, Case]] = [(None, index, case) for index, case in enumerate(warm_up)]
        turns += [(repeat, i, case) for repeat in range(self.repeats) for i, case in enumerate(self.cases)]
        num_runs, number, began = sum(len(case.contenders) for _, _, case in turns), 0, time.perf_counter()
        for turn, (repeat, index, case) in enumerate(turns):
            when = "warming up" if repeat is None else f"repeat {repeat + 1} of {self.repeats}"
            for contender in running_order(case.contenders, turn):
                left = time_left(time.perf_counter() - began, number / num_runs)
                number += 1
                if contender in self.failures:
                    continue
                on_progress(f"{when}, {case.name}: {contender.name} ({number} of {num_runs} runs{left})")
                try:
                    run = await models.run(contender, case.prompts, case.length, with_prompts=self.with_prompts)
                except JobError as error:
                    self.failures[contender] = str(error.__cause__)
                else:
                    if repeat is not None:
                        self.turns.setdefault((repeat, index), {})[contender] = run


def running_order(contenders: Sequence[T], turn: int) -> list[T]:
    """The order of contenders in a turn: every second turn is reversed, and every two turns the start moves by one."""
    begin = turn // 2 % len(contenders)
    rotated = [*contenders[begin:], *contenders[:begin]]
    return rotated if turn % 2 == 0 else rotated[::-1]


def time_left(seconds: float, share_done: float) -> str:
    """Estimate of the time for the rest, as the end of a progress line; "" before anything is done."""
    if share_done == 0:
        return ""
    left = seconds / share_done * (1 - share_done)
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


def named_drafts(drafts: Sequence[ModelSource]) -> dict[str, ModelSource]:
    """Drafters by name: the last part of a path or hub id, or all of it where two of them share that part."""
    paths = [name_of(draft) for draft in drafts]
    parts = [path.rstrip("/").rpartition("/")[2] for path in paths]
    is_clear = [parts.count(part) == 1 and part != TARGET for part in parts]
    names = [part if clear else path for part, path, clear in zip(parts, paths, is_clear, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"draft must be other drafters, to compare them, and {shown(name)} is there twice")
    return dict(zip(names, drafts, strict=True))
