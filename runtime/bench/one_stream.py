"""What speculation buys here: mlx-lm and this runtime decode the same prompts with the same models, in turn.

Every contender runs every prompt in every repeat, and the order changes each time, so that whatever the machine
does meanwhile hits all alike. What counts is ratios within one such run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs

from actors.workers.worker import JobError
from protocol.errors import ModelError
from protocol.settings import MAX_LOOKAHEAD, NGRAM
from protocol.validation import check_integers, validator
from runtime.bench.contenders import PLAIN, Contender, Lookahead, Run, Stage
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
from runtime.loading.model_sources import Source


@attrs.frozen(kw_only=True)
class Plan(BenchmarkRequest):
    """What to measure.

    Raises: SettingsError: something is out of its range.

    Attributes:
        num_draft_tokens: for mlx-lm's speculative decoding, each in [1, 64].
        lookaheads: for this runtime, each in [0, 64] or "auto".
    """

    num_draft_tokens: tuple[int, ...] = attrs.field(
        default=tuple(range(1, 9)), converter=once_each, validator=validator(check_integers, 1, MAX_LOOKAHEAD)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=(0, 1, 2, 3, 4, 6, 8, "auto"),
        converter=once_each,
        validator=validator(check_integers, 0, MAX_LOOKAHEAD, or_auto=True),
    )

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All of them; mlx-lm's plain decoding comes first, and is what the others are compared with."""
        return (
            PLAIN,
            *(Contender("mlx-lm", k) for k in self.num_draft_tokens),
            *(Contender("outrider", lookahead) for lookahead in self.lookaheads),
        )


# --- results --------------------------------------------------------------------------------------


@attrs.frozen
class Row:
    """What one contender did.

    Speeds are in tokens per second from the end of the first round on, over all prompts of a repeat.

    Attributes:
        name, engine, lookahead: who it is.
        speeds: one a repeat.
        median, low, high: of those; None where there are none.
        vs_plain: its median over that of mlx-lm's plain decoding.
        vs_best_speculative: its median over the best median of mlx-lm's speculative decoding, chosen in hindsight.
        acceptance: accepted / proposed; None where nothing was proposed.
        tokens_per_round: tokens over forward passes of the target.
        hit_rate: verdicts whose text had been drafted for already, of all; None for mlx-lm.
        target_busy, draft_busy: fractions of the time in which the model's thread had work; None for mlx-lm.
        limit: tokens per second if drafting were free: those of the target's passes as they were, end to end. None for
            mlx-lm.
        of_limit: how much of that was reached.
        same_texts, num_texts: how many of the texts are those of mlx-lm's plain decoding. In low precision a pass
            of another width may decide a near-tie otherwise. None above temperature 0.
        estimates: what the runtime found out about prices, by name, after the last run; None for mlx-lm.
        failure: why it could not run; None where it could.
    """

    name: str
    engine: str
    lookahead: Lookahead
    speeds: tuple[float, ...]
    median: float | None
    low: float | None
    high: float | None
    vs_plain: float | None
    vs_best_speculative: float | None
    acceptance: float | None
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
    """What was measured, and where.

    Attributes:
        target, draft: the models, by name.
        dtypes: of their weights, by role.
        machine: what the figures depend on: processor, versions, device, BLAS.
        num_prompts, max_tokens, temperature: see `Plan`.
        repeats: how many were asked for.
        repeats_done: how many of them are in the figures, the last perhaps with some of the prompts only.
        is_complete: whether nothing was cut short.
        best_speculative: mlx-lm's fastest speculative row, by name; None where there is none.
        rows: in the order of `Plan.contenders`.
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
    rows: tuple[Row, ...]


@attrs.define
class Measured(Circumstances):
    """What has been measured so far; `result` may be asked for at any time.

    Attributes:
        plan: what is to be.
        turns: by (repeat, prompt), who has done what; in a turn that was cut short, some are missing.
        failures: who cannot run, and why.
    """

    plan: Plan
    turns: dict[tuple[int, int], dict[Contender, Run]] = attrs.field(factory=dict)
    failures: dict[Contender, str] = attrs.field(factory=dict)

    def result(self) -> Benchmark:
        """The figures, of turns in which every contender ran: others would favour some."""
        running = [contender for contender in self.plan.contenders if contender not in self.failures]
        turns = {key: turn for key, turn in self.turns.items() if all(contender in turn for contender in running)}
        # One text a prompt to compare with, the same for all repeats.
        texts = {prompt: turn[PLAIN].tokens for (_, prompt), turn in reversed(turns.items())}
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
        )

    def _row(
        self,
        contender: Contender,
        turns: dict[tuple[int, int], dict[Contender, Run]],
        texts: dict[int, tuple[int, ...]],
    ) -> Row:
        runs = {key: turn[contender] for key, turn in turns.items() if contender in turn}
        of_repeat: dict[int, list[Run]] = {}
        for (repeat, _), run in runs.items():
            of_repeat.setdefault(repeat, []).append(run)
        speeds = [ratio(total(part, "num_timed"), total(part, "seconds")) for part in of_repeat.values()]
        known = tuple(speed for speed in speeds if speed is not None)
        every = list(runs.values())
        seconds, hits = total(every, "seconds"), total(every, "hits")
        same = sum(run.tokens == texts[prompt] for (_, prompt), run in runs.items())
        return Row(
            name=contender.name,
            engine=contender.engine,
            lookahead=contender.lookahead,
            speeds=known,
            median=statistics.median(known) if known else None,
            low=min(known, default=None),
            high=max(known, default=None),
            vs_plain=None,
            vs_best_speculative=None,
            acceptance=ratio(total(every, "accepted"), total(every, "proposed")),
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


def _median(row: Row) -> float:
    return row.median or 0.0


# --- measuring ------------------------------------------------------------------------------------


async def measure(
    target: Source,
    draft: Source,
    plan: Plan | None = None,
    *,
    measured: Measured | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Benchmark:
    """Have all contenders decode all prompts, in turn.

    Args:
        target, draft: as for `runtime.open`. With "ngram" for a draft, mlx-lm only decodes plainly.
        plan: what to measure; None for the defaults.
        measured: where it is collected, made from the same plan; what is in it is of use also after a cancellation.
        on_progress: called with what is being done.

    Raises:
        SettingsError: a dtype for models that are there already.
        PromptError: a prompt cannot be encoded, or does not fit the contexts with what is to be generated.
        ModelError: a model cannot be loaded, or mlx-lm cannot decode plainly with the target.
        VocabularyMismatchError: target and draft do not share a vocabulary.

    Cancellation: strikes after the forward passes that are under way.
    """
    measured = measured or Measured(plan or Plan())
    if draft == NGRAM:
        measured.plan = attrs.evolve(measured.plan, num_draft_tokens=())
    async with AsyncExitStack() as stack:
        cast, prompts = await set_up(stack, target, draft, measured.plan, measured, on_progress)
        stage = Stage(cast)
        await stage.open_runtimes(stack, measured.plan.contenders)
        await _take_turns(stage, prompts, measured, on_progress)
    return measured.result()


async def _take_turns(
    stage: Stage, prompts: Sequence[tuple[int, ...]], measured: Measured, on_progress: Callable[[str], None]
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
            return await stage.run(contender, prompt, plan.max_tokens, plan.temperature)
        except JobError as error:
            if contender == PLAIN:
                raise ModelError(f"mlx-lm cannot decode with the target: {error.__cause__}") from error.__cause__
            measured.failures[contender] = str(error.__cause__)
            return None

    # The first of each builds kernels and buffers, and measures its first prices.
    for contender in plan.contenders:
        await run(contender, prompts[0], "warming up")
    for repeat in range(plan.repeats):
        for number, prompt in enumerate(prompts):
            turn = measured.turns.setdefault((repeat, number), {})
            when = f"repeat {repeat + 1} of {plan.repeats}, prompt {number + 1} of {len(prompts)}"
            for contender in order(plan.contenders, repeat * len(prompts) + number):
                if (result := await run(contender, prompt, when)) is not None:
                    turn[contender] = result
