"""The benchmark of one stream: mlx-lm and this runtime decode the same prompts with the same models, in turn.

Every contender runs every prompt in every repeat, in an order that changes each time, so that disturbances of the
machine hit all contenders alike. Compare only ratios within one such benchmark.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs

from actors.distributed.rank_group import RankGroup
from actors.mlx.model import MLXModel
from actors.workers.worker import JobError
from protocol.errors import ModelError, SettingsError
from protocol.reprs import shown
from protocol.settings import MAX_LOOKAHEAD
from protocol.validation import check_integers, validator
from runtime.bench.contenders import (
    ONLY_DRAFT,
    PLAIN,
    PLAIN_ON_RANKS,
    TARGET,
    Contender,
    ContenderRunner,
    Lookahead,
    Run,
)
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
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import Source


@attrs.frozen(kw_only=True)
class Plan(BenchmarkRequest):
    """What to measure.

    Raises: SettingsError: something is out of its range.

    Attributes:
        num_draft_tokens: proposal lengths for mlx-lm's speculative decoding, each in [1, 64].
        lookaheads: lookaheads of this runtime, each in [0, 64] or "auto".
        drafts: names of the drafters, if there are several. All are compared with the same plain decoding.
        mlx_lm_drafts: those of them, or of the only one ("") that mlx-lm can speculate with, too.
        is_on_ranks: whether the target is sharded over ranks, where mlx-lm's decoding is left out.
    """

    num_draft_tokens: tuple[int, ...] = attrs.field(
        default=tuple(range(1, 9)), converter=without_repeats, validator=validator(check_integers, 1, MAX_LOOKAHEAD)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=(0, 1, 2, 3, 4, 6, 8, "auto"),
        converter=without_repeats,
        validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True),
    )

    drafts: tuple[str, ...] = ("",)
    mlx_lm_drafts: tuple[str, ...] = ("",)
    is_on_ranks: bool = False

    @property
    def plain(self) -> Contender:
        """The plain decoding that the others are compared with: mlx-lm's, or on ranks this runtime's."""
        return PLAIN_ON_RANKS if self.is_on_ranks else PLAIN

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All contenders, first `plain`."""
        ours = [
            Contender("outrider", lookahead, draft="" if lookahead == 0 else draft)
            for draft in self.drafts
            for lookahead in self.lookaheads
        ]
        of_mlx_lm = [
            Contender("mlx-lm", k, draft=draft)
            for draft in ([] if self.is_on_ranks else self.mlx_lm_drafts)
            for k in self.num_draft_tokens
        ]
        return tuple(dict.fromkeys((self.plain, *of_mlx_lm, *ours)))


# --- results --------------------------------------------------------------------------------------


@attrs.frozen
class ContenderRow:
    """The figures of one contender.

    Speeds are in tokens per second from the end of the first round on, over all prompts of a repeat.

    Attributes:
        name, engine, lookahead: see `Contender`.
        draft: the drafter, by its name or path; None for plain decoding.
        speeds: one a repeat.
        median, low, high: median, minimum and maximum of `speeds`; None without speeds.
        vs_plain: median over that of plain decoding, the first row.
        vs_best_speculative: median over the best median of mlx-lm's speculative decoding, chosen in hindsight.
        acceptance: accepted / proposed; None if nothing was proposed.
        fresh_acceptance, stale_acceptance: see `Statistics`.
        tokens_per_round: tokens per forward pass of the target.
        hit_rate: fraction of verdicts whose text had been drafted ahead; None for mlx-lm.
        target_busy, draft_busy: fraction of the time in which the model's thread worked; None for mlx-lm.
        limit: tokens per second if drafting were free, that is if the target's passes followed each other without a
            gap; None for mlx-lm.
        of_limit: speed / limit.
        same_texts, num_texts: number of texts equal to those of plain decoding, the first row, and of all texts. In low
            precision a pass of another width may decide a near-tie differently. None above temperature 0.
        estimates: the runtime's estimates of prices after the last run, by name; None for mlx-lm.
        failure: why the contender could not run; None if it could.
    """

    name: str
    engine: str
    draft: str | None
    lookahead: Lookahead
    speeds: tuple[float, ...]
    median: float | None
    low: float | None
    high: float | None
    vs_plain: float | None
    vs_best_speculative: float | None
    acceptance: float | None
    fresh_acceptance: float | None
    stale_acceptance: float | None
    tokens_per_round: float | None
    hit_rate: float | None
    target_busy: float | None
    draft_busy: float | None
    limit: float | None
    of_limit: float | None
    same_texts: int | None
    num_texts: int
    estimates: dict[str, Any] | None
    failure: str | None


@attrs.frozen
class Benchmark:
    """The results of a benchmark, and its circumstances.

    Attributes:
        target, draft: the models, by name.
        dtypes: those of their weights, by role.
        machine: processor, versions, device and BLAS, by name; of rank 0, if there are several.
        num_prompts, max_tokens, temperature: see `Plan`.
        repeats: number of repeats that were requested.
        repeats_done: number of repeats in the figures; the last may have some of the prompts only.
        is_complete: whether everything was measured.
        best_speculative: name of mlx-lm's fastest speculative row; None if there is none.
        rows: one for each contender, in the order of `Plan.contenders`.
        num_ranks: that the target is sharded over. On several, mlx-lm's decoding is left out.
    """

    target: str
    draft: str
    dtypes: dict[str, tuple[str, ...]]
    machine: dict[str, str]
    num_prompts: int
    max_tokens: int
    temperature: float
    repeats: int
    repeats_done: int
    is_complete: bool
    best_speculative: str | None
    rows: tuple[ContenderRow, ...]
    num_ranks: int = 1


@attrs.define
class Measured(BenchmarkCircumstances):
    """The measurements so far; `result` may be called at any time.

    Attributes:
        plan: what to measure.
        turns: runs of the contenders, by (repeat, prompt); a turn that was interrupted lacks some.
        failures: why a contender cannot run.
    """

    plan: Plan
    turns: dict[tuple[int, int], dict[Contender, Run]] = attrs.field(factory=dict)
    failures: dict[Contender, str] = attrs.field(factory=dict)

    def result(self) -> Benchmark:
        """The figures, from the turns in which every contender ran; incomplete turns would favour some."""
        running = [contender for contender in self.plan.contenders if contender not in self.failures]
        turns = {key: turn for key, turn in self.turns.items() if all(contender in turn for contender in running)}
        # The text to compare with is the same in all repeats.
        texts = {prompt: turn[self.plan.plain].tokens for (_, prompt), turn in reversed(turns.items())}
        rows = [self._row(contender, turns, texts) for contender in self.plan.contenders]
        plain = rows[0].median
        best = max((row for row in rows[1:] if row.engine == "mlx-lm" and row.median), key=_median, default=None)
        rows = [
            attrs.evolve(
                row,
                vs_plain=ratio(row.median, plain),
                vs_best_speculative=None if best is None else ratio(row.median, best.median),
            )
            for row in rows
        ]
        return Benchmark(
            target=self.target,
            draft=self.draft,
            dtypes=self.dtypes,
            machine=self.machine,
            num_prompts=len(self.plan.prompts),
            max_tokens=self.plan.max_tokens,
            temperature=self.plan.temperature,
            repeats=self.plan.repeats,
            repeats_done=len({repeat for repeat, _ in turns}),
            is_complete=len(turns) == self.plan.repeats * len(self.plan.prompts),
            best_speculative=None if best is None else best.name,
            rows=tuple(rows),
            num_ranks=self.num_ranks,
        )

    def _row(
        self,
        contender: Contender,
        turns: dict[tuple[int, int], dict[Contender, Run]],
        texts: dict[int, tuple[int, ...]],
    ) -> ContenderRow:
        runs = {key: turn[contender] for key, turn in turns.items() if contender in turn}
        by_repeat: dict[int, list[Run]] = {}
        for (repeat, _), run in runs.items():
            by_repeat.setdefault(repeat, []).append(run)
        speeds = [ratio(total(part, "num_timed"), total(part, "seconds")) for part in by_repeat.values()]
        known = tuple(speed for speed in speeds if speed is not None)
        every = list(runs.values())
        seconds, hits = total(every, "seconds"), total(every, "hits")
        accepted, accepted_stale = total(every, "accepted") or 0, total(every, "accepted_stale") or 0
        proposed, proposed_stale = total(every, "proposed") or 0, accepted_stale + (total(every, "rejected_stale") or 0)
        same = sum(run.tokens == texts[prompt] for (_, prompt), run in runs.items())
        return ContenderRow(
            name=contender.name,
            engine=contender.engine,
            draft=None if contender.lookahead == 0 else contender.draft or self.draft,
            lookahead=contender.lookahead,
            speeds=known,
            median=statistics.median(known) if known else None,
            low=min(known, default=None),
            high=max(known, default=None),
            vs_plain=None,
            vs_best_speculative=None,
            acceptance=ratio(accepted, proposed),
            fresh_acceptance=ratio(accepted - accepted_stale, proposed - proposed_stale),
            stale_acceptance=ratio(accepted_stale, proposed_stale),
            tokens_per_round=ratio(sum(len(run.tokens) for run in every), total(every, "rounds")),
            hit_rate=None if hits is None else ratio(hits, hits + (total(every, "misses") or 0)),
            target_busy=ratio(total(every, "target_seconds"), seconds),
            draft_busy=ratio(total(every, "draft_seconds"), seconds),
            limit=ratio(total(every, "num_timed"), total(every, "verify_seconds")),
            of_limit=ratio(total(every, "verify_seconds"), seconds),
            same_texts=None if self.plan.temperature > 0 else same,
            num_texts=len(every),
            estimates=every[-1].estimates if every else None,
            failure=self.failures.get(contender),
        )


def _median(row: ContenderRow) -> float:
    return row.median or 0.0


# --- measuring ------------------------------------------------------------------------------------


def named_drafts(drafts: Sequence[Source]) -> dict[str, Source]:
    """Drafters by name: the last part of a path or hub id, or all of it where that names two of them.

    Raises: SettingsError: a drafter is given twice.
    """
    paths = [name_of(draft) for draft in drafts]
    parts = [path.rstrip("/").rpartition("/")[2] for path in paths]
    is_clear = [parts.count(part) == 1 and part != TARGET for part in parts]
    names = [part if clear else path for part, path, clear in zip(parts, paths, is_clear, strict=True)]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"draft must be other drafters, to compare them, and {shown(name)} is there twice")
    return dict(zip(names, drafts, strict=True))


async def measure(
    target: Source,
    draft: Source | list[Source],
    plan: Plan | None = None,
    *,
    measured: Measured | None = None,
    group: RankGroup | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Benchmark:
    """Have all contenders decode all prompts, in turn.

    Args:
        target, draft: as for `runtime.open`; or a list of drafters, to compare them. With prompt lookup, a trained
            drafter or another vocabulary, mlx-lm decodes plainly only.
        plan: what to measure; None for the defaults.
        measured: collects the measurements; made from the same plan. It stays usable after a cancellation.
        group: the ranks that the target is sharded over, as for `runtime.open`. mlx-lm's decoding is left out then: it
            would have to run on all ranks at once, and does not speculate there.
        on_progress: called with a description of each step before it starts.

    Raises:
        SettingsError: a dtype was given for models that are loaded already, or for ranks; or the group cannot be led.
        PromptError: a prompt cannot be encoded, or is too long for a context together with the tokens to generate.
        ModelError: a model cannot be loaded, or mlx-lm cannot decode plainly with the target.
        VocabularyMismatchError: target and draft model have different vocabularies, which cannot be translated.
        RankError: a rank has ended, hangs, differs or fails before anything is measured; it is named. Later it is the
            cause of a `RuntimeBrokenError`.

    Cancellation: takes effect after the current forward passes.
    """
    measured = measured or Measured(plan or Plan())
    named = named_drafts(draft) if isinstance(draft, list) else {}
    drafts = named if len(named) > 1 else {ONLY_DRAFT: draft[0] if isinstance(draft, list) else draft}
    async with AsyncExitStack() as stack:
        pair, prompts = await load_models(stack, target, drafts, measured.plan, measured, on_progress, group)
        names = tuple(named) if len(named) > 1 else ("",)
        of_mlx_lm = tuple(name for name in names if isinstance(pair.models.get(name or ONLY_DRAFT), MLXModel))
        measured.plan = attrs.evolve(
            measured.plan, drafts=names, mlx_lm_drafts=of_mlx_lm, is_on_ranks=group is not None
        )
        runner = ContenderRunner(pair)
        await runner.open_runtimes(stack, measured.plan.contenders)
        await _run_all(runner, prompts, measured, on_progress)
    return measured.result()


async def _run_all(
    runner: ContenderRunner, prompts: Sequence[tuple[int, ...]], measured: Measured, on_progress: Callable[[str], None]
) -> None:
    plan = measured.plan
    num_runs = len(plan.contenders) * (1 + plan.repeats * len(prompts))
    began, done = time.perf_counter(), 0

    async def run(contender: Contender, prompt: tuple[int, ...], when: str) -> Run | None:
        nonlocal done
        done += 1
        if contender in measured.failures:
            return None
        on_progress(f"{when}: {contender.name} ({done} of {num_runs} runs{time_left(began, done - 1, num_runs)})")
        try:
            return await runner.run(contender, prompt, plan.max_tokens, plan.temperature)
        except JobError as error:
            if contender == PLAIN:
                raise ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}") from error.__cause__
            measured.failures[contender] = str(error.__cause__)
            return None

    # The first run of each contender builds kernels and buffers, and measures its first prices.
    for contender in plan.contenders:
        await run(contender, prompts[0], "warming up")
    for repeat in range(plan.repeats):
        for number, prompt in enumerate(prompts):
            turn = measured.turns.setdefault((repeat, number), {})
            when = f"repeat {repeat + 1} of {plan.repeats}, prompt {number + 1} of {len(prompts)}"
            for contender in running_order(plan.contenders, repeat * len(prompts) + number):
                if (result := await run(contender, prompt, when)) is not None:
                    turn[contender] = result
