"""The subject of a benchmark: a target and its drafters, each on its own thread, and the machine they run on."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.mlx.model import MLXModel, dtypes_of
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, Worker
from protocol.errors import PromptError, SettingsError
from protocol.settings import NGRAM
from protocol.trace import Event
from runtime.generation.text import encode_prompt
from runtime.loading import blas
from runtime.loading.device import processor_name
from runtime.loading.model_files import name_of
from runtime.loading.model_sources import (
    Loaded,
    LoadedDraft,
    Source,
    check_draft_source,
    check_source,
    load_draft_onto,
)
from runtime.ranks.leading import check_group, leading, worker_for
from runtime.ranks.sharded_target import load_target_onto

if TYPE_CHECKING:
    from runtime.bench.benchmark import Plan

# Any of the models of a benchmark.
AnyModel = MLXModel | TranslatedModel | TrainedDrafter
# The names of the target and of an only drafter among the models of a benchmark.
TARGET, ONLY_DRAFT = "target", "draft"


class EventSwitch:
    """Passes the workers' events to the runtime of the current contender."""

    def __init__(self) -> None:
        self.listener: Callable[[Event], None] | None = None

    def __call__(self, event: Event) -> None:
        """Pass on an event."""
        if self.listener is not None:
            self.listener(event)


@attrs.frozen
class Subject:
    """A target with one drafter or several, and their workers.

    Attributes:
        models, workers: by name: `TARGET`, `ONLY_DRAFT`, or `Contender.draft` if there are several. Each model was made
            on its worker's thread. A drafter that is missing here drafts by prompt lookup.
        events: receives the spans of the workers.
        cache_options: options of the runtime's caches; mlx-lm's caches follow those about quantisation.
        default_draft: the name of the drafter that contenders without a name for theirs have.
        group: the ranks that the target is sharded over; None for one machine. mlx-lm cannot decode with it there.
    """

    models: dict[str, AnyModel]
    workers: dict[str, Worker]
    events: EventSwitch
    cache_options: CacheOptions = attrs.field(factory=CacheOptions)
    default_draft: str = ONLY_DRAFT
    group: RankGroup | None = None

    @property
    def target(self) -> MLXModel:
        """The target."""
        target = self.models[TARGET]
        assert isinstance(target, MLXModel)
        return target

    def draft_named(self, name: str) -> tuple[AnyModel, Worker] | None:
        """A drafter and its worker, the only one for ""; None for prompt lookup."""
        name = name or self.default_draft
        return (self.models[name], self.workers[name]) if name in self.models else None


@attrs.define
class Circumstances:
    """What a benchmark ran on.

    Attributes:
        target, draft: the models, by name; of several drafters all names.
        dtypes: those of their weights, by role; or the name of a drafter, if there are several.
        machine: processor, versions, device and BLAS, by name; of rank 0, if there are several.
        num_ranks: that the target is sharded over.
    """

    target: str = ""
    draft: str = ""
    dtypes: dict[str, tuple[str, ...]] = attrs.field(factory=dict)
    machine: dict[str, str] = attrs.field(factory=dict)
    num_ranks: int = 1


async def load_subject(
    stack: AsyncExitStack,
    target: Source,
    drafts: Mapping[str, Source],
    plan: Plan,
    circumstances: Circumstances,
    on_progress: Callable[[str], None],
    group: RankGroup | None = None,
) -> tuple[Subject, list[tuple[int, ...]]]:
    """Load a target and its drafters onto threads of their own.

    Args:
        stack: ends the threads on exit.
        target: as for `runtime.open`.
        drafts: likewise, by name: `ONLY_DRAFT`, or `Contender.draft` if there are several. "ngram" loads nothing.
        plan: what to measure.
        circumstances: filled in here.
        on_progress: called with a description of each step before it starts.
        group: the ranks that the target is sharded over; None for one machine.

    Returns: the models, and the prompts as token ids.

    Raises: SettingsError, PromptError, ModelError, VocabularyMismatchError, RankError: see
        `runtime.bench.one_stream.measure`.
    """
    target = check_source("target", target)
    sources = {name: check_draft_source(draft) for name, draft in drafts.items() if draft != NGRAM}
    if plan.dtype is not None and any(isinstance(source, tuple) for source in (target, *sources.values())):
        raise SettingsError("dtype is for models that are loaded here; cast one that is there already yourself")
    if group is not None:
        for draft in (None, *sources.values()):
            check_group(group, target, draft)
        if plan.dtype is not None:
            raise SettingsError("dtype does not go with ranks: each has its part as it is in the files; leave it out")
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
    loaded_target = await load_target_onto(workers[TARGET], target, plan.cache_options, group)
    await _cast_on(workers[TARGET], loaded_target.model, plan.dtype)
    loaded: dict[str, LoadedDraft] = {}
    for name, source in sources.items():
        on_progress("loading the draft" + ("" if name == ONLY_DRAFT else f" {name}"))
        loaded[name] = await load_draft_onto(workers[name], source, plan.cache_options, loaded_target)
        await _cast_on(workers[name], loaded[name].model, plan.dtype)
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
    prompts = _encode(loaded_target, loaded, plan)
    subject = Subject(models, workers, events, plan.cache_options, default_draft=next(iter(drafts)), group=group)
    return subject, prompts


async def _cast_on(worker: Worker, model: AnyModel, dtype: str | None) -> None:
    if dtype is not None:
        await worker.run(Job("load", partial(_cast, model.module, getattr(mx, dtype))))


def _cast(module: Module, dtype: mx.Dtype) -> None:
    module.set_dtype(dtype)
    mx.eval(module)


def _encode(target: Loaded, drafts: Mapping[str, LoadedDraft], plan: Plan) -> list[tuple[int, ...]]:
    """The prompts as token ids.

    Raises: PromptError.
    """
    prompts = [encode_prompt(prompt, target.tokenizer, target.model.vocab_size) for prompt in plan.prompts]
    lengths = [target.model.context_length, *(draft.model.context_length for draft in drafts.values())]
    context = min((length for length in lengths if length is not None), default=None)
    longest = max(map(len, prompts))
    if context is not None and longest + plan.max_tokens > context:
        raise PromptError(
            f"a prompt of {longest} tokens and max_tokens={plan.max_tokens} do not fit a context of {context} "
            "tokens; shorten one of them"
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
