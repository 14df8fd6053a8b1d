"""What all benchmarks share: the request, the loaded models, the circumstances, and helpers for figures."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, TypeVar

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.mlx.model import dtypes_of
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, Worker
from protocol.errors import PromptError, SettingsError
from protocol.open_options import OpenOptions
from protocol.settings import NGRAM, settings_from
from protocol.validation import check_integer, must_be, validator
from protocol.wording import Message
from runtime.bench.contenders import ONLY_DRAFT, TARGET, AnyModel, EventSwitch, ModelPair
from runtime.generation.text import encode_prompt
from runtime.loading import blas
from runtime.loading.demo import DEMO_PROMPTS
from runtime.loading.device import processor_name
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import (
    Loaded,
    LoadedDraft,
    Source,
    caches_of,
    check_draft_source,
    check_source,
    load_draft_onto,
)
from runtime.ranks.leading import check_group, leading, worker_for
from runtime.ranks.sharded_target import load_target_onto

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
        return caches_of(
            OpenOptions(
                rewind=self.rewind,
                kv_bits=self.kv_bits,
                kv_group_size=self.kv_group_size,
                quantized_kv_start=self.quantized_kv_start,
            )
        )

    @prompts.validator
    def _check_prompts(self, _: object, prompts: tuple[Any, ...]) -> None:
        if not prompts:
            raise PromptError("there is no prompt to measure with; give at least one")

    @dtype.validator
    def _check_dtype(self, _: object, dtype: Any) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise must_be("dtype", Message("one of {types} or {none}", types=", ".join(DTYPES)), dtype)


@attrs.define
class BenchmarkCircumstances:
    """What a benchmark ran on.

    Attributes:
        target, draft: the models, by name; of several drafters all names.
        dtypes: those of their weights, by role; or the name of a drafter, if there are several.
        machine: processor, versions, device and BLAS, by name; of rank 0, if there are several.
        num_ranks: that the target is sharded over.
    """

    target: str = attrs.field(default="", kw_only=True)
    draft: str = attrs.field(default="", kw_only=True)
    dtypes: dict[str, tuple[str, ...]] = attrs.field(factory=dict, kw_only=True)
    machine: dict[str, str] = attrs.field(factory=dict, kw_only=True)
    num_ranks: int = attrs.field(default=1, kw_only=True)


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
    drafts: Mapping[str, Source],
    request: BenchmarkRequest,
    circumstances: BenchmarkCircumstances,
    on_progress: Callable[[str], None],
    group: RankGroup | None = None,
) -> tuple[ModelPair, list[tuple[int, ...]]]:
    """Load a target and its drafters onto threads of their own.

    Args:
        stack: ends the threads on exit.
        target: as for `runtime.open`.
        drafts: likewise, by name: `ONLY_DRAFT`, or `Contender.draft` if there are several. "ngram" loads nothing.
        request: what to measure.
        circumstances: filled in here.
        on_progress: called with a description of each step before it starts.
        group: the ranks that the target is sharded over; None for one machine.

    Returns: the models, and the prompts as token ids.

    Raises: SettingsError, PromptError, ModelError, VocabularyMismatchError, RankError: see
        `runtime.bench.one_stream.measure`.
    """
    target = check_source("target", target)
    sources = {name: check_draft_source(draft) for name, draft in drafts.items() if draft != NGRAM}
    if request.dtype is not None and any(isinstance(source, tuple) for source in (target, *sources.values())):
        raise SettingsError.of("{dtype} is for models that are loaded here; cast one that is there already yourself")
    if group is not None:
        for draft in (None, *sources.values()):
            check_group(group, target, draft)
        if request.dtype is not None:
            raise SettingsError.of(
                "{dtype} does not go with ranks: each has its part as it is in the files; leave it out"
            )
        circumstances.num_ranks = group.size
    stack.enter_context(wired_memory())
    events = EventSwitch()
    target_thread = worker_for("target", events, group, None)
    workers: dict[str, Worker] = {TARGET: await stack.enter_async_context(target_thread)}
    if group is not None:
        stack.enter_context(leading(group, target_thread))
    for name in sources:
        workers[name] = await stack.enter_async_context(ThreadWorker("draft", events))
    on_progress("loading the target")
    loaded_target = await load_target_onto(workers[TARGET], target, request.cache_options, group)
    await _cast_on(workers[TARGET], loaded_target.model, request.dtype)
    loaded: dict[str, LoadedDraft] = {}
    for name, source in sources.items():
        on_progress("loading the draft" + ("" if name == ONLY_DRAFT else f" {name}"))
        loaded[name] = await load_draft_onto(workers[name], source, request.cache_options, loaded_target)
        await _cast_on(workers[name], loaded[name].model, request.dtype)
    loaded_target.model.record_features(None)  # until a contender needs them
    models: dict[str, AnyModel] = {
        TARGET: loaded_target.model,
        **{name: one.model for name, one in loaded.items()},
    }
    circumstances.target = name_of(target)
    circumstances.draft = ", ".join(NGRAM if draft == NGRAM else name_of(draft) for draft in drafts.values())
    for name, model in models.items():
        circumstances.dtypes[name] = dtypes_of(model.module)
    circumstances.machine = _machine()
    if group is not None:
        circumstances.machine["ranks"] = f"{group.size}, of which this is the first"
    prompts = _encode(loaded_target, loaded, request)
    pair = ModelPair(models, workers, events, request.cache_options, default_draft=next(iter(drafts)), group=group)
    return pair, prompts


async def _cast_on(worker: Worker, model: AnyModel, dtype: str | None) -> None:
    if dtype is not None:
        await worker.run(Job("load", partial(_cast, model.module, getattr(mx, dtype))))


def _cast(module: Module, dtype: mx.Dtype) -> None:
    module.set_dtype(dtype)
    mx.eval(module)


def _encode(target: Loaded, drafts: Mapping[str, LoadedDraft], request: BenchmarkRequest) -> list[tuple[int, ...]]:
    """The prompts as token ids.

    Raises: PromptError.
    """
    prompts = [encode_prompt(prompt, target.tokenizer, target.model.vocab_size) for prompt in request.prompts]
    lengths = [target.model.context_length, *(draft.model.context_length for draft in drafts.values())]
    context = min((length for length in lengths if length is not None), default=None)
    longest = max(map(len, prompts))
    if context is not None and longest + request.max_tokens > context:
        raise PromptError.of(
            "a prompt of {longest} tokens and {max_tokens=} do not fit a context of {context} tokens; shorten one of "
            "them",
            longest=longest,
            max_tokens=request.max_tokens,
            context=context,
        )
    return prompts


def _machine() -> dict[str, str]:
    """Processor, versions, device and BLAS."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    machine = {
        "device": mx.default_device().type.name,
        "processor": f"{processor_name()}, {blas.num_usable_cores()} cores",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {versions}",
    }
    if (library := blas.blas_in_use()) is not None:
        machine["linear algebra"] = library
    if blas.shares_cores():
        machine["BLAS threads"] = (
            f"{blas.num_usable_cores()} for a model that computes alone, shared by models that compute at the same time"
        )
    return machine


# --- progress -------------------------------------------------------------------------------------


def time_left(began: float, done: int, total: int) -> str:
    """Estimate of the time for the remaining runs, as the end of a progress line; "" before the first is done."""
    if done == 0:
        return ""
    seconds = (time.perf_counter() - began) / done * (total - done)
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
