"""What all benchmarks share: the request, the loaded models, the circumstances, and helpers for figures."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import attrs
import mlx.core as mx

from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.mlx.model import MLXModel
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown
from protocol.settings import NGRAM, settings_from
from protocol.trace import Actor
from protocol.validation import check_integer, validator
from runtime.bench.contenders import EventSwitch, ModelPair, blas_threads
from runtime.generation.text import check_vocabularies, encode_prompt
from runtime.loading import blas
from runtime.loading.demo import DEMO_PROMPTS
from runtime.loading.model_sources import (
    Loaded,
    Source,
    check_cache_options,
    check_source,
    load_onto,
)
from runtime.loading.processor import processor_name

DTYPES = ("float32", "bfloat16", "float16")

# Enough to leave something to time after the first round.
MIN_TOKENS = 16


def without_repeats(values: Iterable[Any]) -> tuple[Any, ...]:
    """The values in order, each once."""
    return tuple(dict.fromkeys(values))


@attrs.frozen(kw_only=True)
class BenchmarkRequest:
    """What to measure, as far as all benchmarks share it.

    Raises: SettingsError: something is out of its range.

    Attributes:
        prompts: texts or sequences of token ids; at least one.
        max_tokens: number of tokens to generate for each prompt, >= 16; nothing ends a text earlier.
        repeats: number of times that each contender runs everything, >= 1.
        temperature: >= 0; 0 is greedy.
        dtype: "float32", "bfloat16" or "float16": the loaded models are cast to it; None leaves them as they are.
        rewind, kv_bits, kv_group_size, quantized_kv_start: as for `runtime.open`; mlx-lm quantises its caches in the
            same way.
    """

    prompts: tuple[str | Sequence[int], ...] = attrs.field(default=DEMO_PROMPTS, converter=tuple)
    max_tokens: int = attrs.field(default=96, validator=validator(check_integer, MIN_TOKENS))
    repeats: int = attrs.field(default=3, validator=validator(check_integer, 1))
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
        return check_cache_options(self.rewind, None, self.kv_bits, self.kv_group_size, self.quantized_kv_start)

    @prompts.validator
    def _check_prompts(self, _: object, prompts: tuple[Any, ...]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to measure with; give at least one")

    @dtype.validator
    def _check_dtype(self, _: object, dtype: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise SettingsError(f"dtype must be one of {', '.join(DTYPES)} or None, got {shown(dtype)}")


@attrs.define
class BenchmarkCircumstances:
    """What a benchmark ran on.

    Attributes:
        target, draft: the models, by name.
        dtypes: those of their weights, by role.
        machine: processor, versions, device and BLAS, by name.
    """

    target: str = attrs.field(default="", kw_only=True)
    draft: str = attrs.field(default="", kw_only=True)
    dtypes: dict[str, tuple[str, ...]] = attrs.field(factory=dict, kw_only=True)
    machine: dict[str, str] = attrs.field(factory=dict, kw_only=True)


T = TypeVar("T")


def running_order(contenders: Sequence[T], turn: int) -> tuple[T, ...]:
    """The order of contenders in a turn: every second turn is reversed, and every two turns start one further on."""
    begin = turn // 2 % len(contenders)
    rotated = (*contenders[begin:], *contenders[:begin])
    return rotated if turn % 2 == 0 else rotated[::-1]


# --- figures --------------------------------------------------------------------------------------


def ratio(part: float | None, whole: float | None) -> float | None:
    """Part / whole; None if either is None or `whole` is 0."""
    return part / whole if part is not None and whole else None


def total(runs: Sequence[object], name: str) -> float | None:
    """The sum of an attribute over runs; None if there are no runs or the attribute is None for one of them."""
    values = [getattr(run, name) for run in runs]
    return sum(values) if values and None not in values else None


# --- models ---------------------------------------------------------------------------------------


async def load_models(
    stack: AsyncExitStack,
    target: Source,
    draft: Source,
    request: BenchmarkRequest,
    circumstances: BenchmarkCircumstances,
    on_progress: Callable[[str], None],
) -> tuple[ModelPair, list[tuple[int, ...]]]:
    """Load two models onto threads of their own.

    Args:
        stack: ends the threads on exit.
        target, draft: as for `runtime.open`; with "ngram" for a draft, only the target is loaded.
        request: what to measure.
        circumstances: filled in here.
        on_progress: called with a description of each step before it starts.

    Returns: the models, and the prompts as token ids.

    Raises: SettingsError, PromptError, ModelError, VocabularyMismatchError: see `runtime.bench.one_stream.measure`.
    """
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    if draft == NGRAM:
        circumstances.draft = NGRAM
    else:
        sources["draft"] = check_source("draft", draft)
    if request.dtype is not None and any(isinstance(source, tuple) for source in sources.values()):
        raise SettingsError("dtype is for models that are loaded here; cast one that is there already yourself")
    stack.enter_context(wired_memory())
    events = EventSwitch()
    workers: dict[str, Worker] = {role: await stack.enter_async_context(ThreadWorker(role, events)) for role in sources}
    loaded: dict[str, Loaded] = {}
    for role in sources:
        on_progress(f"loading the {role}")
        loaded[role] = await _load(workers[role], role, sources[role], request)
    models = {role: one.model for role, one in loaded.items()}
    await _note_circumstances(circumstances, sources, models, workers)
    prompts = await _encode(workers["target"], loaded, request)
    return ModelPair(models, workers, events, request.cache_options), prompts


async def _load(worker: Worker, role: str, source: Source, request: BenchmarkRequest) -> Loaded:
    loaded = await load_onto(worker, role, source, request.cache_options)
    if request.dtype is not None:
        await worker.run(Job("load", partial(_cast, loaded.model, getattr(mx, request.dtype))))
    return loaded


def _cast(model: MLXModel, dtype: mx.Dtype) -> None:
    model.module.set_dtype(dtype)
    mx.eval(model.module)


async def _encode(worker: Worker, loaded: dict[str, Loaded], request: BenchmarkRequest) -> list[tuple[int, ...]]:
    """The prompts as token ids, which are the same for both models.

    Raises: PromptError, VocabularyMismatchError.
    """
    target, draft = loaded["target"], loaded.get("draft")
    if draft is not None and target.tokenizer is not None and draft.tokenizer is not None:
        try:
            await worker.run(Job("load", partial(check_vocabularies, target.tokenizer, draft.tokenizer)))
        except JobError as error:
            raise (error.__cause__ or error) from None
    prompts = [encode_prompt(prompt, target.tokenizer, target.model.vocab_size) for prompt in request.prompts]
    context = min((c for one in loaded.values() if (c := one.model.context_length) is not None), default=None)
    longest = max(map(len, prompts))
    if context is not None and longest + request.max_tokens > context:
        raise PromptError(
            f"a prompt of {longest} tokens and max_tokens={request.max_tokens} do not fit a context of {context} "
            "tokens; shorten one of them"
        )
    return prompts


async def _note_circumstances(
    circumstances: BenchmarkCircumstances,
    sources: dict[Actor, Source],
    models: dict[str, MLXModel],
    workers: dict[str, Worker],
) -> None:
    circumstances.target = _name(sources["target"])
    if "draft" in sources:
        circumstances.draft = _name(sources["draft"])
    for role in sources:
        anatomy = await workers[role].run(Job("load", models[role].anatomy))
        circumstances.dtypes[role] = anatomy.dtypes
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    circumstances.machine = {
        "device": mx.default_device().type.name,
        "processor": f"{processor_name()}, {blas.num_usable_cores()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}",
    }
    if (library := blas.blas_in_use()) is not None:
        circumstances.machine["linear algebra"] = library
    if (threads := blas_threads(len(sources))) is not None:
        circumstances.machine["BLAS threads"] = (
            f"{threads['mlx-lm']} for mlx-lm, {threads['outrider']} for each of this runtime's models"
        )


def _name(source: Source) -> str:
    return type(source[0]).__name__ if isinstance(source, tuple) else str(source)


# --- progress -------------------------------------------------------------------------------------


def time_left(began: float, done: int, total: int) -> str:
    """Estimate of the time for the remaining runs, as the end of a progress line; "" before the first is done."""
    if done == 0:
        return ""
    seconds = (time.perf_counter() - began) / done * (total - done)
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
