"""Opens a runtime: checks the arguments, loads and times models, and starts actors; and `stream` on the one in use."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

import attrs
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.distributed.rank_group import RankGroup
from actors.drafters.draft_actor import DraftActor
from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.drafters.lookup_actor import LookupActor
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set, wired_memory
from actors.mlx.model import MLXModel
from actors.model import Model
from actors.persistence.saved_sequence import SavableModel
from actors.remote.link import SILENCE_S
from actors.remote.remote_drafter import LoadedElsewhere, RemoteDrafter
from actors.target.target_actor import TargetActor
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.warm_up import warm_up
from actors.workers.core_sharing import CORES
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.argument_aliases import MISSING
from protocol.drafter_wire import VERSION, LoadDrafter
from protocol.errors import (
    ModelError,
    NoRuntimeError,
    OutriderError,
    RankError,
    RuntimeClosedError,
    WrongEventLoopError,
)
from protocol.open_options import AUTO_STREAMS, AUTO_TURNS, OpenOptions, WorkAhead
from protocol.prices import Prices
from protocol.reprs import size_in_words
from protocol.settings import AUTO_DRAFT, NGRAM, SettingsLike, keywords_of
from protocol.settings_keywords import SettingsArguments
from protocol.target_queue import TargetQueue
from protocol.trace import ActorName, Event, Events
from runtime.engine.drafter_slot import DrafterActor, DrafterSlot, Load, LoadedDrafter
from runtime.engine.memory import weights_of
from runtime.engine.nursery import BackgroundNursery, interrupts_unwrapped
from runtime.engine.runtime import CLOSED, Runtime
from runtime.generation.text import Prompt
from runtime.generation.token_stream import TokenStream
from runtime.loading.device import default_memory_limit
from runtime.loading.model_files import sampling_defaults
from runtime.loading.model_sources import (
    Loaded,
    ModelSource,
    caches_of,
    check_draft_source,
    check_source,
    check_unknown,
    load_auto_onto,
    load_draft_onto,
)
from runtime.loading.tokenizers import check_template_args, copy_of
from runtime.persistence.disk_prefix_cache import DiskPrefixCache, check_folder
from runtime.ranks.leading import check_group, ending_all, leading, worker_for
from runtime.ranks.sharded_target import check_drafter, load_target_onto
from runtime.remote import draft_process
from runtime.remote.drafting import OPTIONS as DRAFTING_OPTIONS
from runtime.remote.drafting import load_elsewhere
from runtime.tracing.trace_files import TimelineFile, Trace, TraceWriter, check_trace

logger = logging.getLogger("outrider")


_current: ContextVar[Runtime | None] = ContextVar("outrider_runtime", default=None)


class OpenArguments(TypedDict, total=False):
    """The options of `open` beside `target` and `draft`; `protocol.open_options.OpenOptions` says what they mean."""

    rewind: str
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    max_streams: int | Literal["auto"] | None
    max_batch: int
    prefix_cache_bytes: int
    idle_reading: bool
    prefix_cache_dir: str | os.PathLike[str] | None
    prefix_cache_dir_bytes: int
    memory_limit: int | Literal["auto"] | None
    wire_memory: bool
    defaults: SettingsLike | None
    generation_config: str
    chat_template_args: Mapping[str, Any] | None
    trace: Trace
    group: RankGroup | None
    draft_rank: int | None
    draft_process: bool
    draft_device: str | None
    work_ahead: WorkAhead


class OpenArgumentsAndSettings(OpenArguments, SettingsArguments, total=False):
    """Options of `open` and settings side by side, as `generate_sync` takes them."""


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open(
    target: ModelSource = MISSING, draft: ModelSource | None = None, **options: Unpack[OpenArguments]
) -> AsyncIterator[Runtime]:
    """Load a target and a draft model, and keep them at work until the block is left.

    Args:
        target, draft, **options: see `protocol.open_options.OpenOptions`.

    Yields: a `Runtime`. `runtime.stream` uses it, too, in this task and its children.

    Raises: before the block is entered, with everything released again:
        SettingsError: the target is missing, or an option is unknown or out of its range.
        ModelError: a model cannot be loaded (the original error is the cause), its caches do not support the `rewind`
            that was named, or the models take all of `memory_limit`.
        VocabularyMismatchError: target and draft model have different vocabularies, which cannot be translated.
        RankError: another rank has failed, or has another model. If that happens later, it is the cause of the
            `RuntimeBrokenError` that every stream raises.

    Cancellation: leaving the block ends every stream, waits for the forward passes that are running (at most one a
    model) and joins the threads, also while being cancelled. A cancellation while loading waits for the load.
    """
    if not trio.lowlevel.in_trio_task():
        raise WrongEventLoopError(
            "runtime.open is for trio; under asyncio use runtime.aio.open, without an event loop runtime.open_sync"
        )
    sources, given = check_open(target, draft, options)
    group, caches, events, prices = given.group, caches_of(given), Events(), Prices(core_hold_s=CORES.hold_s)

    async with AsyncExitStack() as stack:
        # First in, last out: a trace includes the last spans of the workers.
        listener = await _begin_trace(given.trace, events, stack)
        if given.wire_memory:
            stack.enter_context(wired_memory())
        draft_stack = await stack.enter_async_context(AsyncExitStack())  # released with the drafter
        worker = await stack.enter_async_context(worker_for(events, group, given.draft_rank))
        if group is not None:
            stack.enter_context(leading(group, worker, given.draft_rank))
        # One after the other: MLX's CUDA kernels are compiled at their first use, which two threads at once may break.
        loaded = await load_target_onto(worker, sources["target"], caches, group)
        at_target = loaded.model, worker
        load_draft = _DraftLoader(given, caches, sources["target"], loaded, worker, events, prices)
        at_draft: LoadedDrafter | None = "ngram" if draft == NGRAM else None
        if "draft" in sources:
            at_draft = await load_draft.load(draft_stack, sources["draft"], group)
        has_model = at_draft is not None and at_draft != "ngram"
        if not has_model:
            _warn_if_too_large(loaded.model)
        if isinstance(listener, TimelineFile):
            listener.tokenizer = loaded.tokenizer
        stack.enter_context(loaded.model.evaluating_layers())
        copied = partial(copy_of, loaded.tokenizer, given.chat_template_args or {})
        tokenizer = await worker.run(Job("load", copied))
        max_batch = 1 if given.max_streams == 1 else await bounded_batch(*at_target, given.max_batch)
        options["max_batch"] = max_batch
        if given.max_streams == "auto":
            options["max_streams"] = AUTO_TURNS if max_batch == 1 else max(AUTO_TURNS, min(AUTO_STREAMS, max_batch))
        # In no variable: this frame lives as long as the runtime, and a detached drafter's memory is to be freed.
        num_bytes = weights_of([loaded.model, *([at_draft[0]] if isinstance(at_draft, tuple) else [])])
        options["memory_limit"] = _memory_limit(given.memory_limit, num_bytes)
        asks = given.generation_config == "auto"
        sampling = sampling_defaults(loaded.folder) if asks else {}
        options["defaults"] = {**sampling, **keywords_of(given.defaults, "defaults")}
        if has_model:
            await _time_models(at_target, at_draft, prices)
        async with running(
            at_target,
            at_draft,
            tokenizer=tokenizer,
            shared_tokenizer=loaded.tokenizer,
            events=events,
            prices=prices,
            make_policy=partial(policy_by_settings, work_ahead=given.work_ahead),
            draft_resources=draft_stack,
            load_draft=load_draft,
            **options,
        ) as runtime:
            # Detaching the drafter frees its memory, so nothing here may refer to it.
            del draft, at_draft
            runtime.model_defaults = sampling
            sources.pop("draft", None)
            with nullcontext() if group is None else ending_all(group, runtime._sessions.fail):
                yield runtime


OPTIONS = tuple(name for name in attrs.fields_dict(OpenOptions) if name not in ("target", "draft"))


def check_open(target: Any, draft: Any, options: Mapping[str, Any]) -> tuple[dict[ActorName, ModelSource], OpenOptions]:
    """Check the arguments of `open`, as far as possible without loading a model. Raises: as `open`.

    Returns: the models to load, and the options.
    """
    check_unknown({name: value for name, value in options.items() if name not in OPTIONS}, OPTIONS)
    sources: dict[ActorName, ModelSource] = {"target": check_source("target", target)}
    if draft is not None and draft != NGRAM:
        try:
            sources["draft"] = check_draft_source(draft, sources["target"])
        except ModelError:
            if not options.get("draft_rank"):
                raise
            sources["draft"] = draft  # the path may exist where it is loaded
    given = OpenOptions(**options)
    if given.prefix_cache_dir is not None:
        check_folder(given.prefix_cache_dir)
    keywords_of(given.defaults, "defaults")
    check_template_args(given.chat_template_args)
    check_group(given.group, sources["target"], sources.get("draft"), given.draft_rank)
    if given.has_draft_process:
        draft_process.check_draft_process(sources["target"], sources.get("draft"))
    return sources, given


async def _begin_trace(trace: Trace, events: Events, stack: AsyncExitStack) -> Callable[[Event], None] | None:
    if (listener := check_trace(trace)) is None:
        return None
    if isinstance(listener, TraceWriter) and listener is not trace:
        await stack.enter_async_context(listener)
    has_failed = False

    def call(event: Event) -> None:
        nonlocal has_failed
        if has_failed:
            return
        # This is the user's code: whatever it raises, generation goes on.
        try:
            listener(event)
        except Exception:
            has_failed = True
            logger.exception("the trace function failed on %r and is not called again", event)

    events.listen(call)
    return listener


async def bounded_batch(model: Model, worker: Worker, max_batch: int) -> int:
    """The most texts in a pass: 1 if those of the model cannot share passes. That is found out by feeding it some."""
    if max_batch == 1:
        return 1
    try:
        with interrupts_unwrapped():
            obstacle = await worker.run(Job("warm-up", model.sharing_obstacle))
    except JobError as error:
        obstacle = str(error)
    if obstacle is None:
        return max_batch
    logger.info("streams take turns at the target: %s", obstacle)
    return 1


@attrs.frozen
class _DraftLoader:
    """Loads the drafters of a runtime for `target`, which came from `source` and is at work on `worker`."""

    options: OpenOptions
    caches: CacheOptions
    source: ModelSource
    target: Loaded
    worker: ThreadWorker
    events: Events
    prices: Prices

    async def __call__(self, stack: AsyncExitStack, draft: ModelSource) -> LoadedDrafter | None:
        """Load a drafter into the open runtime; see `runtime.engine.drafter_slot.Load`."""
        if draft == NGRAM:
            self.prices.forget_drafter()
            return "ngram"
        source = check_draft_source(draft, self.source)
        check_drafter(source)
        if self.options.has_draft_process:
            draft_process.check_draft_process(self.source, source)
        if (loaded := await self.load(stack, source, None)) is not None:
            self.prices.forget_drafter()
            await _time_models((self.target.model, self.worker), loaded, self.prices)
        return loaded

    async def load(self, stack: AsyncExitStack, draft: ModelSource, group: RankGroup | None) -> LoadedDrafter | None:
        """Load a drafter with a model, here or at the rank of `group` that drafts; None if "auto" finds nothing.

        Raises: as `load_draft_onto`, and RankError: the rank that drafts is lost.
        """
        if draft == AUTO_DRAFT:
            return await load_auto_onto(stack, self.target.folder, partial(self.load, group=group))
        if group is not None and group.drafter is not None:
            elsewhere = await load_elsewhere(group.drafter, self._asked(None, None), RankError)
        elif self.options.has_draft_process:
            link = await stack.enter_async_context(draft_process.draft_process(self.options.draft_device))
            asked = self._asked(draft_process.described(self.source), draft_process.described(draft))
            elsewhere = await load_elsewhere(link, asked, ModelError)
            link.max_silence_s = SILENCE_S
        else:
            worker = await stack.enter_async_context(ThreadWorker("draft", self.events, may_be_given_up=True))
            drafter = (await load_draft_onto(worker, draft, self.caches, self.target.drafted)).model
            self._stop_recording_with(stack)
            _warn_if_too_large(self.target.model, drafter)
            stack.enter_context(drafter.evaluating_layers())
            return drafter, worker
        if (layers := elsewhere.loaded.feature_layers) is not None:
            self.target.model.record_features(layers)
            self._stop_recording_with(stack)
        return elsewhere

    def _stop_recording_with(self, stack: AsyncExitStack) -> None:
        """Have the target record no more for a drafter when its stack is closed. One that hangs is released late, when
        the target may record for the next one.
        """
        model = self.target.model
        recorder = model.recorder_slot.recorder

        def stop() -> None:
            if model.recorder_slot.recorder is recorder:
                model.record_features(None)

        stack.callback(stop)

    def _asked(self, target: dict[str, Any] | None, draft: dict[str, Any] | None) -> LoadDrafter:
        options = {name: getattr(self.options, name) for name in DRAFTING_OPTIONS}
        size, caches = self.target.model.vocab_size, attrs.asdict(self.caches)
        return LoadDrafter(VERSION, target, draft, size, caches, options, self.events.wants_instants)


async def _time_models(target: tuple[Model, Worker], draft: LoadedDrafter | None, prices: Prices) -> None:
    """Time the models that are here, so that the lookahead policy begins with measured prices."""
    try:
        with interrupts_unwrapped():
            await warm_up(target, draft if isinstance(draft, tuple) else None, prices)
    except JobError as error:
        # Streams will meet the same error, and report it as that of their model.
        logger.info("the models could not be timed: %s", error)


async def keep_open(
    target: ModelSource = MISSING,
    draft: ModelSource | None = None,
    *,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[OpenArguments],
) -> None:
    """`open` as a task: `rt = await nursery.start(runtime.keep_open, target, draft)`. `await rt.aclose()` ends it.

    Args, Raises: as `open`.

    Cancellation: ends it, too; see `open`.
    """
    is_released = trio.Event()
    try:
        async with open(target, draft, **options) as runtime:
            runtime._is_released = is_released
            task_status.started(runtime)
            await runtime._is_left.wait()
    finally:
        is_released.set()


def _memory_limit(given: int | str | None, model_bytes: int) -> int | None:
    """Raises: ModelError: the models take all of the memory that was given."""
    if not isinstance(given, int):
        return None if given is None else default_memory_limit(model_bytes)
    if given <= model_bytes:
        raise ModelError(
            f"the weights of the models take {size_in_words(model_bytes)}, and memory_limit is {size_in_words(given)}, "
            "caches included; raise it, or use smaller or quantised models"
        )
    return given


def _warn_if_too_large(*models: MLXModel | TranslatedModel | TrainedDrafter) -> None:
    if (limit := recommended_working_set()) is None:
        return
    if (num_bytes := weights_of(models)) > limit:
        logger.warning(
            "the weights of the models take %.1f GB, and this device recommends to use at most %.1f GB, caches "
            "included: expect it to be slow; use a smaller or quantised model%s",
            num_bytes / 1e9,
            limit / 1e9,
            ", or no draft model" if len(models) > 1 else "",
        )


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def running(
    target: tuple[Model, Worker],
    draft: LoadedDrafter | None,
    *,
    tokenizer: TokenizerWrapper | None = None,
    shared_tokenizer: TokenizerWrapper | None = None,
    events: Events | None = None,
    prices: Prices | None = None,
    make_policy: MakePolicy = policy_by_settings,
    draft_resources: AsyncExitStack | None = None,
    load_draft: Load | None = None,
    chains: bool | None = None,
    **options: Unpack[OpenArguments],
) -> AsyncIterator[Runtime]:
    """A runtime over loaded models and their workers, real or in simulated time, which the caller enters and leaves.

    Args:
        shared_tokenizer: what `Runtime.tokenizer` returns; `tokenizer` if None.
        events, prices: where the workers announce their spans, and what the models are known to cost.
        draft_resources: closed once the drafter is detached, or the runtime is left.
        load_draft: loads a drafter to attach; None if none can be attached.
        chains: see `DraftActor`.
        **options: those of `open` that are about streams, prefix caches and memory; `max_streams` is a number or None,
            and "auto" means no `memory_limit`.
    """
    events, prices, given = events or Events(), prices or Prices(), OpenOptions(**options)
    async with BackgroundNursery() as nursery:
        runtime: Runtime | None = None

        def on_failure(error: OutriderError) -> None:
            assert runtime is not None
            runtime._sessions.fail(error)

        target_queue = TargetQueue(prices.verify, given.max_batch)
        target_actor = TargetActor(
            *target,
            events,
            prices,
            on_failure=on_failure,
            prefix_cache_bytes=given.prefix_cache_bytes,
            target_queue=target_queue,
            max_batch=given.max_batch,
        )

        def keep_on_disk(actor: TargetActor | DraftActor) -> None:
            if given.prefix_cache_dir is not None and isinstance(actor.model, SavableModel):
                DiskPrefixCache(actor, check_folder(given.prefix_cache_dir), given.prefix_cache_dir_bytes)

        clock, mailbox, vocab_size = target[1].clock, target_actor.mailbox, target[0].vocab_size
        lookup = partial(
            LookupActor, events, prices, clock, target=mailbox, target_vocab_size=vocab_size, make_policy=make_policy
        )

        def make_drafter(draft: LoadedDrafter) -> DrafterActor:
            if draft == NGRAM:
                return lookup()
            if isinstance(draft, LoadedElsewhere):
                return RemoteDrafter(draft, events, prices, clock, target=mailbox, target_vocab_size=vocab_size)
            actor = DraftActor(
                *draft,
                events,
                prices,
                target=mailbox,
                target_vocab_size=vocab_size,
                make_policy=make_policy,
                prefix_cache_bytes=given.prefix_cache_bytes,
                target_queue=target_queue,
                chains=chains,
                max_batch=given.max_batch,
            )
            actor.prefix_room = lambda: math.inf if runtime is None else runtime._sessions.memory.prefix_room("draft")
            keep_on_disk(actor)
            return actor

        of_grammars = lookup(grammar_only=True)
        await nursery.start(of_grammars.serve)
        drafter = DrafterSlot(nursery, target_actor, of_grammars, make_drafter, load_draft)
        if draft is not None:
            await drafter.put(draft, draft_resources or AsyncExitStack())
        del draft  # the slot holds it, until it is detached
        keep_on_disk(target_actor)
        if (store := target_actor.prefix_cache.store) is not None:
            nursery.start_soon(store.run)
        await nursery.start(target_actor.serve)
        shared_tokenizer = tokenizer if shared_tokenizer is None else shared_tokenizer
        runtime = Runtime(target_actor, drafter, tokenizer, shared_tokenizer, events, prices, nursery, given)
        end = partial(runtime._sessions.close, RuntimeClosedError(CLOSED))
        # A cancellation from further out ends the actors at once, and the block maybe later.
        target_actor.when_over(end)
        before = _current.get()
        _current.set(runtime)
        try:
            yield runtime
        finally:
            _current.set(before)
            end()
            runtime._sessions.memory.close()


def stream(prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]) -> TokenStream:
    """`Runtime.stream`, on the runtime that the current task is running under.

    Raises: NoRuntimeError: there is none; and what `Runtime.stream` raises.
    """
    if (runtime := _current.get()) is None:
        raise NoRuntimeError("no runtime is open here; use this inside `async with runtime.open(...)`")
    return runtime.stream(prompt, settings, **overrides)
