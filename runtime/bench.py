"""What speculation buys here: mlx-lm and this runtime decode the same prompts with the same models, in turn.

Every contender runs every prompt in every repeat, and the order changes each time, so that whatever the machine
does meanwhile hits all alike. What counts is ratios within one such run.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from actors.mlx_model import CacheOptions, MLXModel, wired_memory
from actors.worker import Job, JobError, ThreadWorker, Worker
from protocol.errors import ModelError, PromptError, SettingsError
from protocol.settings import MAX_LOOKAHEAD, NGRAM, settings_from
from protocol.trace import Actor
from runtime import blas
from runtime.contenders import PLAIN, Contender, Lookahead, Run, Stage, Switch, blas_threads
from runtime.demo import DEMO_PROMPTS
from runtime.opening import Loaded, Source, check_source, load_onto
from runtime.text import check_vocabularies, encode_prompt

DTYPES = ("float32", "bfloat16", "float16")

# So that there is something to time behind the first round.
MIN_TOKENS = 16


def _numbers(low: int, high: int, *, or_auto: bool) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], values: Any) -> None:
        for value in values:
            is_number = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
            if not is_number and not (or_auto and value == "auto"):
                allowed = f"whole numbers in [{low}, {high}]" + (' or "auto"' if or_auto else "")
                raise SettingsError(f"{attribute.name} must be {allowed}, got {value!r} among them")

    return check


def _at_least(low: int) -> Any:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise SettingsError(f"{attribute.name} must be a whole number of at least {low}, got {value!r}")

    return check


def _once_each(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


@attrs.frozen(kw_only=True)
class Plan:
    """What to measure.

    Raises: SettingsError: something is out of its range.

    Attributes:
        prompts: texts, or token ids; at least one.
        num_draft_tokens: for mlx-lm's speculative decoding, each in [1, 64].
        lookaheads: for this runtime, each in [0, 64] or "auto".
        max_tokens: tokens to generate for each prompt, >= 16; nothing ends a text earlier.
        repeats: how often each contender runs each prompt, >= 1.
        temperature: >= 0; 0 is greedy.
        dtype: cast the models to it once they are loaded: "float32", "bfloat16" or "float16"; None leaves them.
    """

    prompts: tuple[str | Sequence[int], ...] = attrs.field(default=DEMO_PROMPTS, converter=tuple)
    num_draft_tokens: tuple[int, ...] = attrs.field(
        default=tuple(range(1, 9)), converter=_once_each, validator=_numbers(1, MAX_LOOKAHEAD, or_auto=False)
    )
    lookaheads: tuple[Lookahead, ...] = attrs.field(
        default=(0, 1, 2, 3, 4, 6, 8, "auto"), converter=_once_each, validator=_numbers(0, MAX_LOOKAHEAD, or_auto=True)
    )
    max_tokens: int = attrs.field(default=96, validator=_at_least(MIN_TOKENS))
    repeats: int = attrs.field(default=3, validator=_at_least(1))
    temperature: float = attrs.field(default=0.0, validator=lambda _, __, value: settings_from({"temperature": value}))
    dtype: str | None = attrs.field(default=None)

    @prompts.validator
    def _check_prompts(self, _: object, prompts: tuple[Any, ...]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to measure with; give at least one")

    @dtype.validator
    def _check_dtype(self, _: object, dtype: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise SettingsError(f"dtype must be one of {', '.join(DTYPES)} or None, got {dtype!r}")

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All of them; mlx-lm's plain decoding comes first, and is what the others are compared with."""
        return (
            PLAIN,
            *(Contender("mlx-lm", k) for k in self.num_draft_tokens),
            *(Contender("outrider", lookahead) for lookahead in self.lookaheads),
        )


def order(contenders: Sequence[Contender], turn: int) -> tuple[Contender, ...]:
    """Who runs after whom, the `turn`-th time: every other turn goes backwards, and every two begin elsewhere."""
    begin = turn // 2 % len(contenders)
    rotated = (*contenders[begin:], *contenders[:begin])
    return rotated if turn % 2 == 0 else rotated[::-1]


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
class Measured:
    """What has been measured so far; `result` may be asked for at any time.

    Attributes:
        plan: what is to be.
        target, draft, dtypes, machine: see `Benchmark`.
        turns: by (repeat, prompt), who has done what; in a turn that was cut short, some are missing.
        failures: who cannot run, and why.
    """

    plan: Plan
    target: str = ""
    draft: str = ""
    dtypes: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    machine: dict[str, str] = attrs.field(factory=dict)
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
                vs_plain=_ratio(row.median, plain),
                vs_best_speculative=None if best is None else _ratio(row.median, best.median),
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
        speeds = [_ratio(_sum(part, "num_timed"), _sum(part, "seconds")) for part in of_repeat.values()]
        known = tuple(speed for speed in speeds if speed is not None)
        every = list(runs.values())
        seconds, hits = _sum(every, "seconds"), _sum(every, "hits")
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
            acceptance=_ratio(_sum(every, "accepted"), _sum(every, "proposed")),
            tokens_per_round=_ratio(sum(len(run.tokens) for run in every), _sum(every, "rounds")),
            hit_rate=None if hits is None else _ratio(hits, hits + (_sum(every, "misses") or 0)),
            target_busy=_ratio(_sum(every, "target_seconds"), seconds),
            draft_busy=_ratio(_sum(every, "draft_seconds"), seconds),
            limit=_ratio(_sum(every, "num_timed"), _sum(every, "verify_seconds")),
            of_limit=_ratio(_sum(every, "verify_seconds"), seconds),
            same_texts=None if self.plan.temperature > 0 else same,
            num_texts=len(every),
            estimates=every[-1].estimates if every else None,
            failure=self.failures.get(contender),
        )


def _median(row: Row) -> float:
    return row.median or 0.0


def _sum(runs: Sequence[Run], name: str) -> float | None:
    """The sum of an attribute over runs; None where it is not known of all, or there are none."""
    values = [getattr(run, name) for run in runs]
    return sum(values) if values and None not in values else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


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
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    if draft == NGRAM:
        measured.draft = NGRAM
        measured.plan = attrs.evolve(measured.plan, num_draft_tokens=())
    else:
        sources["draft"] = check_source("draft", draft)
    plan = measured.plan
    if plan.dtype is not None and any(isinstance(source, tuple) for source in sources.values()):
        raise SettingsError("dtype is for models that are loaded here; cast one that is there already yourself")
    async with AsyncExitStack() as stack:
        stack.enter_context(wired_memory())
        events = Switch()
        workers: dict[str, Worker] = {
            role: await stack.enter_async_context(ThreadWorker(role, on_event=events)) for role in sources
        }
        loaded: dict[str, Loaded] = {}
        for role in sources:
            on_progress(f"loading the {role}")
            loaded[role] = await _load(workers[role], role, sources[role], plan.dtype)
        models = {role: one.model for role, one in loaded.items()}
        await _note_circumstances(measured, sources, models, workers)
        prompts = await _encode(workers["target"], loaded, plan)
        stage = Stage(models, workers, events)
        await stage.open_runtimes(stack, plan.contenders)
        await _take_turns(stage, prompts, measured, on_progress)
    return measured.result()


async def _take_turns(
    stage: Stage, prompts: Sequence[tuple[int, ...]], measured: Measured, on_progress: Callable[[str], None]
) -> None:
    plan = measured.plan
    total = len(plan.contenders) * (1 + plan.repeats * len(prompts))
    began, done = time.perf_counter(), 0

    async def run(contender: Contender, prompt: tuple[int, ...], when: str) -> Run | None:
        nonlocal done
        done += 1
        if contender in measured.failures:
            return None
        on_progress(f"{when}: {contender.name} ({done} of {total} runs{_time_left(began, done - 1, total)})")
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


def _time_left(began: float, done: int, total: int) -> str:
    if done == 0:
        return ""
    seconds = (time.perf_counter() - began) / done * (total - done)
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


async def _load(worker: Worker, role: str, source: Source, dtype: str | None) -> Loaded:
    loaded = await load_onto(worker, role, source, CacheOptions())
    if dtype is not None:
        await worker.run(Job("load", partial(_cast, loaded.model, getattr(mx, dtype))))
    return loaded


def _cast(model: MLXModel, dtype: mx.Dtype) -> None:
    model.module.set_dtype(dtype)
    mx.eval(model.module)


async def _encode(worker: Worker, loaded: dict[str, Loaded], plan: Plan) -> list[tuple[int, ...]]:
    """The prompts as ids, for both models.

    Raises: PromptError, VocabularyMismatchError.
    """
    target, draft = loaded["target"], loaded.get("draft")
    if draft is not None and target.tokenizer is not None and draft.tokenizer is not None:
        try:
            await worker.run(Job("load", partial(check_vocabularies, target.tokenizer, draft.tokenizer)))
        except JobError as error:
            raise (error.__cause__ or error) from None
    prompts = [encode_prompt(prompt, target.tokenizer, target.model.vocab_size) for prompt in plan.prompts]
    room = min((c for one in loaded.values() if (c := one.model.context_length) is not None), default=None)
    longest = max(map(len, prompts))
    if room is not None and longest + plan.max_tokens > room:
        raise PromptError(
            f"a prompt of {longest} tokens and max_tokens={plan.max_tokens} do not fit a context of {room} tokens; "
            "shorten one of them"
        )
    return prompts


async def _note_circumstances(
    measured: Measured, sources: dict[Actor, Source], models: dict[str, MLXModel], workers: dict[str, Worker]
) -> None:
    measured.target = _name(sources["target"])
    if "draft" in sources:
        measured.draft = _name(sources["draft"])
    for role in sources:
        anatomy = await workers[role].run(Job("load", models[role].anatomy))
        measured.dtypes[role] = anatomy.dtypes
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    measured.machine = {
        "device": mx.default_device().type.name,
        "processor": f"{_processor()}, {blas.num_usable_cores()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}",
    }
    if (library := blas.blas_in_use()) is not None:
        measured.machine["linear algebra"] = library
    if (threads := blas_threads(len(sources))) is not None:
        theirs, ours = threads
        measured.machine["BLAS threads"] = f"{theirs} for mlx-lm, {ours} for each of this runtime's models"


def _name(source: Source) -> str:
    return type(source[0]).__name__ if isinstance(source, tuple) else str(source)


def _processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
