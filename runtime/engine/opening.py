"""Opening a runtime: checks the arguments, loads and times the models, and starts the actors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Unpack

import attrs
import trio

from actors.distributed.rank_group import RankGroup
from actors.drafters.drafter import policy_by_settings
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set, wired_memory
from actors.mlx.model import MLXModel
from actors.model import Model
from actors.remote.link import SILENCE_S
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.warm_up import warm_up
from actors.workers.core_sharing import CORES
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.argument_aliases import MISSING
from protocol.drafter_wire import VERSION, LoadDrafter
from protocol.errors import ModelError, RankError, WrongEventLoopError
from protocol.open_options import AUTO_STREAMS, AUTO_TURNS, OpenOptions
from protocol.prices import Prices
from protocol.settings import AUTO_DRAFT, NGRAM, keywords_of
from protocol.trace import Actor, Event
from runtime.engine.drafter_slot import LoadedDrafter
from runtime.engine.events import Events
from runtime.engine.nursery import interrupts_unwrapped
from runtime.engine.open_options import OpenArguments
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.loading import mlx_environment
from runtime.loading.model_sources import (
    Loaded,
    Source,
    caches_of,
    check_draft_source,
    check_source,
    check_unknown,
    load_auto_onto,
    load_draft_onto,
)
from runtime.loading.tokenizers import check_template_args, copy_of
from runtime.persistence.prefix_files import check_folder
from runtime.ranks.leading import check_group, ending_all, leading, worker_for
from runtime.ranks.sharded_target import check_drafter, load_target_onto
from runtime.remote import draft_process
from runtime.remote.drafting import OPTIONS as DRAFTING_OPTIONS
from runtime.remote.drafting import load_elsewhere
from runtime.tracing.trace_files import Recorder, TimelineFile, Trace, check_trace

logger = logging.getLogger("outrider")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open(
    target: Source = MISSING, draft: Source | None = None, **options: Unpack[OpenArguments]
) -> AsyncIterator[Runtime]:
    """Load a target and a draft model, and keep them at work until the block is left.

    Args:
        target, draft, **options: see `protocol.open_options.OpenOptions`.

    Yields: a `Runtime`. `runtime.stream` uses it, too, in this task and its children.

    Raises: before the block is entered, with everything released again:
        SettingsError: the target is missing, or an option is unknown or out of its range.
        ModelError: a model cannot be loaded (the original error is the cause), or its caches do not support the
            `rewind` that was named.
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
    (mlx_environment.tune if given.tune_mlx else mlx_environment.untune)()
    group, caches, events, prices = given.group, caches_of(given), Events(), Prices(core_hold_s=CORES.hold_s)

    async with AsyncExitStack() as stack:
        # First in, last out: a trace includes the last spans of the workers.
        listener = await _begin_trace(given.trace, events, stack)
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
        options["max_streams"] = await _max_streams(given, *at_target)
        options["max_batch"] = loaded.model.bounded_batch(given.max_batch)
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
            sources.pop("draft", None)
            with nullcontext() if group is None else ending_all(group, runtime._sessions.fail):
                yield runtime


OPTIONS = tuple(name for name in attrs.fields_dict(OpenOptions) if name not in ("target", "draft"))


def check_open(target: Any, draft: Any, options: Mapping[str, Any]) -> tuple[dict[Actor, Source], OpenOptions]:
    """Check the arguments of `open`, as far as possible without loading a model.

    Args:
        target, draft: as for `open`.
        options: options of `open`, by name; those that are missing have their defaults.

    Returns: the models to load, and the options.

    Raises: SettingsError, ModelError: as `open`.
    """
    check_unknown({name: value for name, value in options.items() if name not in OPTIONS}, OPTIONS)
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    if draft is not None and draft != NGRAM:
        try:
            sources["draft"] = check_draft_source(draft)
        except ModelError:
            if not options.get("draft_rank"):
                raise
            sources["draft"] = draft  # the path may be there where it is loaded
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
    listener = check_trace(trace)
    if isinstance(listener, Recorder) and listener is not trace:
        await stack.enter_async_context(listener)
    if listener is not None:
        events.listen(_guarded(listener))
    return listener


async def _max_streams(options: OpenOptions, model: MLXModel, worker: Worker) -> int | None:
    """Most streams at work at once, with "auto" decided by whether texts can share passes."""
    # Found out in any case, so that no stream waits for that.
    shares_passes = options.max_batch > 1 and options.max_streams != 1 and await _probe_sharing(model, worker)
    if options.max_streams != "auto":
        return options.max_streams
    return max(AUTO_TURNS, min(AUTO_STREAMS, options.max_batch)) if shares_passes else AUTO_TURNS


@attrs.frozen
class _DraftLoader:
    """Loads the drafters of a runtime.

    Attributes:
        options: of `open`.
        caches: those of caches among them.
        source, target, worker: the target, where it came from, and its worker.
        events, prices: the runtime's.
    """

    options: OpenOptions
    caches: CacheOptions
    source: Source
    target: Loaded
    worker: ThreadWorker
    events: Events
    prices: Prices

    async def __call__(self, stack: AsyncExitStack, draft: Source) -> LoadedDrafter | None:
        """Load a drafter into the open runtime; see `runtime.engine.drafter_slot.Load`."""
        if draft == NGRAM:
            self.prices.forget_drafter()
            return "ngram"
        source = check_draft_source(draft)
        check_drafter(source)
        if self.options.has_draft_process:
            draft_process.check_draft_process(self.source, source)
        if (loaded := await self.load(stack, source, None)) is not None:
            self.prices.forget_drafter()
            await _time_models((self.target.model, self.worker), loaded, self.prices)
        return loaded

    async def load(self, stack: AsyncExitStack, draft: Source, group: RankGroup | None) -> LoadedDrafter | None:
        """Load a drafter with a model.

        Args:
            stack: what is released with the drafter.
            draft: where it comes from.
            group: the ranks, one of which may draft.

        Returns: None if the draft is "auto" and nothing fits.

        Raises: as `load_draft_onto`, and RankError: the rank that drafts is lost.
        """
        if draft == AUTO_DRAFT:
            return await load_auto_onto(stack, self.target, partial(self.load, group=group))
        stack.callback(self.target.model.record_features, None)
        if group is not None and group.drafter is not None:
            elsewhere = await load_elsewhere(group.drafter, self._asked(None, None), RankError)
        elif self.options.has_draft_process:
            link = await stack.enter_async_context(draft_process.draft_process(self.options.draft_device))
            asked = self._asked(draft_process.described(self.source), draft_process.described(draft))
            elsewhere = await load_elsewhere(link, asked, ModelError)
            link.max_silence_s = SILENCE_S
        else:
            worker = await stack.enter_async_context(ThreadWorker("draft", self.events, may_be_given_up=True))
            drafter = (await load_draft_onto(worker, draft, self.caches, self.target)).model
            _warn_if_too_large(self.target.model, drafter)
            stack.enter_context(drafter.evaluating_layers())
            return drafter, worker
        if (layers := elsewhere.loaded.feature_layers) is not None:
            self.target.model.record_features(layers)
        return elsewhere

    def _asked(self, target: dict[str, Any] | None, draft: dict[str, Any] | None) -> LoadDrafter:
        options = {name: getattr(self.options, name) for name in DRAFTING_OPTIONS}
        size, caches = self.target.model.vocab_size, attrs.asdict(self.caches)
        return LoadDrafter(VERSION, target, draft, size, caches, options, self.events.wants_instants)


async def _probe_sharing(model: MLXModel, worker: Worker) -> bool:
    """Whether texts can share passes."""
    try:
        with interrupts_unwrapped():
            obstacle = await worker.run(Job("warm-up", model.sharing_obstacle))
    except JobError as error:
        obstacle = str(error)
    if obstacle is not None:
        logger.info("streams take turns at the target: %s", obstacle)
    return obstacle is None


async def _time_models(target: tuple[Model, Worker], draft: LoadedDrafter | None, prices: Prices) -> None:
    """Time the models that are here, so that the lookahead policy begins with measured prices."""
    try:
        with interrupts_unwrapped():
            await warm_up(target, draft if isinstance(draft, tuple) else None, prices)
    except JobError as error:
        # Streams will meet the same error, and report it as that of their model.
        logger.info("the models could not be timed: %s", error)


async def keep_open(
    target: Source = MISSING,
    draft: Source | None = None,
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


def _warn_if_too_large(*models: MLXModel | TranslatedModel | TrainedDrafter) -> None:
    if (limit := recommended_working_set()) is None:
        return
    # One module may be target and draft model.
    distinct = {id(model.module): model for model in models}
    num_bytes = sum(model.num_bytes for model in distinct.values())
    if num_bytes > limit:
        logger.warning(
            "the weights of the models take %.1f GB, and this device recommends to use at most %.1f GB, caches "
            "included: expect it to be slow; use a smaller or quantised model%s",
            num_bytes / 1e9,
            limit / 1e9,
            ", or no draft model" if len(distinct) > 1 else "",
        )


def _guarded(trace: Callable[[Event], None]) -> Callable[[Event], None]:
    """A user's trace function, whose errors do not reach the runtime; it is not called again after the first."""
    failed = False

    def call(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        # This is the user's code: whatever it raises, generation goes on.
        try:
            trace(event)
        except Exception:
            failed = True
            logger.exception("the trace function failed on %r and is not called again", event)

    return call
