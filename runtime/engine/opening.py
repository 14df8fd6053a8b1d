"""Opening a runtime: checks the arguments, loads and times the models, and starts the actors."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, Literal, Never, Unpack

import trio

from actors.actor import PREFIX_CACHE_BYTES
from actors.distributed.drafting.remote_drafter import RemoteDrafter
from actors.distributed.rank_group import RankGroup
from actors.drafters.drafter import policy_by_settings
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import recommended_working_set, wired_memory
from actors.mlx.model import MLXModel
from actors.model import Model
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.warm_up import warm_up
from actors.workers.core_sharing import CORES
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.argument_aliases import MISSING
from protocol.errors import ModelError, SettingsError, WrongEventLoopError
from protocol.lookahead_policy import WORK_AHEAD, WorkAhead
from protocol.prices import Prices
from protocol.reprs import shown
from protocol.settings import AUTO_STREAMS, AUTO_TURNS, MAX_BATCH, NGRAM, SettingsLike, keywords_of
from protocol.trace import Actor, Event
from protocol.validation import check_integer
from runtime.engine.drafter_slot import LoadedDrafter
from runtime.engine.events import Events
from runtime.engine.nursery import interrupts_unwrapped
from runtime.engine.open_options import OpenOptions
from runtime.engine.running import running
from runtime.engine.runtime import Runtime
from runtime.loading import mlx_environment
from runtime.loading.model_sources import (
    Loaded,
    Source,
    check_cache_options,
    check_draft_source,
    check_source,
    check_unknown,
)
from runtime.loading.tokenizers import check_template_args, copy_of
from runtime.persistence.prefix_files import check_folder
from runtime.ranks.draft_rank import load_drafter_onto
from runtime.ranks.leading import check_group, ending_all, leading, worker_for
from runtime.ranks.sharded_target import check_drafter, load_target_onto
from runtime.tracing.trace_files import Recorder, TimelineFile, Trace, check_trace

logger = logging.getLogger("outrider")

# Default bound of the prefix cache on disk, in bytes.
PREFIX_CACHE_DIR_BYTES = 16 * 1024**3


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open(
    target: Source = MISSING,
    draft: Source | None = None,
    *,
    rewind: str = "auto",
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    max_streams: int | Literal["auto"] | None = None,
    max_batch: int = MAX_BATCH,
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    prefix_cache_dir: str | os.PathLike[str] | None = None,
    prefix_cache_dir_bytes: int = PREFIX_CACHE_DIR_BYTES,
    defaults: SettingsLike | None = None,
    chat_template_args: Mapping[str, Any] | None = None,
    trace: Trace = None,
    tune_mlx: bool = True,
    group: RankGroup | None = None,
    draft_rank: int | None = None,
    work_ahead: WorkAhead = "auto",
    **unknown: Never,
) -> AsyncIterator[Runtime]:
    """Load a target and a draft model, and keep them at work until the block is left.

    Args:
        target: a path or hub id for `mlx_lm.load`; a `ModelSpec`, which is one with an adapter, a revision or other
            options of `mlx_lm.load`; or a pair `(model, tokenizer)`. If the tokenizer is None, prompts are token ids
            and texts stay empty.
        draft: likewise, also with another vocabulary; or the folder of a drafter that was trained for the target
            (EAGLE-3, Medusa, an MTP layer); or "mtp" for the MTP layer in the target's own files; or "ngram" for
            prompt lookup, which drafts without a model: it proposes what followed the same tokens earlier in the
            prompt and the text; or None for plain decoding by the same actors.
        rewind: how caches are rewound after a rejection. *trim* drops the tail; *checkpoint* restores the state
            from before the round and feeds the accepted tokens again in front of the next window; *none* feeds one
            committed token at a time. "auto" takes, before each round, the first of them that every layer's cache
            supports at that moment; naming one insists on it.
        max_kv_size: most tokens that a cache keeps, >= 5, for models that make no caches of their own; all but the
            first four are forgotten, oldest first. None for no bound.
        kv_bits: quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits; None does not.
        kv_group_size: quantisation group, 32, 64 or 128.
        quantized_kv_start: quantise a cache once it has this many tokens, >= 0.
        max_streams: most streams that the models work on at the same time, >= 1, which bounds the memory for caches;
            further streams wait in the order of their calls. "auto" for 16 where streams of the target share passes,
            or `max_batch` where that is less, and for 4 where they take turns. None for no bound.
        max_batch: most streams that share one forward pass of the target, >= 1. With 1 each has passes of its own: in
            low precision, a pass over several texts rounds otherwise than one over one.
        prefix_cache_bytes: size of each model's prefix cache, >= 0: cached sequences of finished texts, for streams
            with `reuse_prefix`; the least recently used one goes first. 0 keeps none.
        prefix_cache_dir: a directory for what leaves the target's prefix cache, also at the end; it is made if it is
            missing, and several runtimes may share it. Texts with the same beginning find it there, also after a
            restart. Its files are those of saved sessions: of this model and these cache options only, and with
            checksums. They have the tokens of texts. None keeps nothing.
        prefix_cache_dir_bytes: bound of the directory's size, >= 0; the least recently used files are deleted.
        defaults: settings of every stream that is not given others: a `Settings`, or a mapping of some by name. A
            logits processor among them is shared by all streams.
        chat_template_args: variables of the target's chat template, such as `{"enable_thinking": False}`, for every
            prompt of messages; a conversation's `thinking` and what a request says go before them.
        trace: the path of a file to write: Chrome trace JSON, for Perfetto or chrome://tracing, or the timeline as a
            page if the name ends in .html. The file is complete once the block is left, for whatever reason. Or a
            function that is called in trio's thread with each `Span` and `Instant`, and should return quickly.
        tune_mlx: whether MLX gets the environment variables of `runtime.loading.mlx_environment`, which leave a drafter
            room on a GPU. MLX reads them when it first computes there: False has no effect after that.
        group: the ranks that the target is sharded over, from `runtime.join_ranks`; the others call `runtime.follow`
            with the same target. This process is rank 0. None for one process.
        draft_rank: a rank of the group that holds the drafter alone, and no part of the target; it calls
            `runtime.follow` with the drafter, too. None or 0 for rank 0, which drafts beside its part of the target.
        work_ahead: whether the drafter drafts while the target verifies. That takes from the target what the device has
            to share, and the next proposal is there sooner: "auto" weighs the two by measured prices, "never" drafts
            after the verdict, and "always" does not ask the prices at a fixed `lookahead`.
        **unknown: an error.

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
    sources, options = check_open(
        target,
        draft,
        {
            "rewind": rewind,
            "max_kv_size": max_kv_size,
            "kv_bits": kv_bits,
            "kv_group_size": kv_group_size,
            "quantized_kv_start": quantized_kv_start,
            "max_streams": max_streams,
            "max_batch": max_batch,
            "prefix_cache_bytes": prefix_cache_bytes,
            "prefix_cache_dir": prefix_cache_dir,
            "prefix_cache_dir_bytes": prefix_cache_dir_bytes,
            "defaults": defaults,
            "chat_template_args": chat_template_args,
            "trace": trace,
            "tune_mlx": tune_mlx,
            "group": group,
            "draft_rank": draft_rank,
            "work_ahead": work_ahead,
            **unknown,
        },
    )
    if tune_mlx:
        mlx_environment.tune()
    else:
        mlx_environment.untune()
    events = Events()
    listener = check_trace(trace)

    async with AsyncExitStack() as stack:
        if isinstance(listener, Recorder) and listener is not trace:
            # First in, last out: a trace includes the last spans of the workers.
            await stack.enter_async_context(listener)
        if listener is not None:
            events.listen(_guarded(listener))
        stack.enter_context(wired_memory())
        draft_stack = await stack.enter_async_context(AsyncExitStack())  # released with the drafter
        workers = {
            role: await (draft_stack if role == "draft" else stack).enter_async_context(
                worker_for(role, events, group, draft_rank)
            )
            for role in sources
        }
        if group is not None:
            stack.enter_context(leading(group, workers["target"], workers.get("draft"), draft_rank))
        # One after the other: MLX's CUDA kernels are compiled at their first use, which two threads at once may break.
        target_loaded, drafter = await load_target_onto(workers["target"], sources["target"], options, group), None
        if "draft" in sources:
            drafter = await load_drafter_onto(
                workers["draft"], sources["draft"], options, target_loaded, group, draft_stack
            )
        _warn_if_too_large(each for each in (target_loaded.model, drafter) if each is not None)
        if isinstance(listener, TimelineFile):
            listener.tokenizer = target_loaded.tokenizer
        stack.enter_context(target_loaded.model.evaluating_layers())
        if drafter is not None:
            draft_stack.enter_context(drafter.evaluating_layers())
        copied = partial(copy_of, target_loaded.tokenizer, chat_template_args or {})
        tokenizer = await workers["target"].run(Job("load", copied))
        may_share = max_batch > 1 and max_streams != 1
        shares_passes = may_share and await _probe_sharing(target_loaded.model, workers["target"])
        if max_streams == "auto":
            max_streams = max(AUTO_TURNS, min(AUTO_STREAMS, max_batch)) if shares_passes else AUTO_TURNS
        prices = Prices(core_hold_s=CORES.hold_s)
        if drafter is not None:
            await _time_models((target_loaded.model, workers["target"]), (drafter, workers["draft"]), prices)
        async with running(
            (target_loaded.model, workers["target"]),
            (drafter, workers["draft"]) if drafter is not None else NGRAM if draft == NGRAM else None,
            tokenizer=tokenizer,
            shared_tokenizer=target_loaded.tokenizer,
            events=events,
            prices=prices,
            make_policy=partial(policy_by_settings, work_ahead=work_ahead),
            max_streams=max_streams,
            max_batch=target_loaded.model.bounded_batch(max_batch),
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache_dir=None if prefix_cache_dir is None else check_folder(prefix_cache_dir),
            prefix_cache_dir_bytes=prefix_cache_dir_bytes,
            defaults=defaults,
            draft_resources=draft_stack,
            load_draft=partial(_load_draft, target_loaded, workers["target"], options, events, prices),
        ) as runtime:
            # Detaching the drafter frees its memory, so nothing here may refer to it.
            del draft, drafter
            for by_role in (workers, sources):
                by_role.pop("draft", None)
            with nullcontext() if group is None else ending_all(group, runtime._sessions.fail):
                yield runtime


_CACHE_OPTIONS = ("rewind", "max_kv_size", "kv_bits", "kv_group_size", "quantized_kv_start")

OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(open).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


def check_open(target: Any, draft: Any, options: Mapping[str, Any]) -> tuple[dict[Actor, Source], CacheOptions]:
    """Check the arguments of `open`, as far as possible without loading a model.

    Args:
        target, draft: as for `open`.
        options: options of `open`, by name; those that are missing have their defaults.

    Returns: the models to load, and the options of their caches.

    Raises: SettingsError, ModelError: as `open`.
    """
    check_unknown({name: value for name, value in options.items() if name not in OPTIONS}, OPTIONS)
    given = {name: inspect.signature(open).parameters[name].default for name in OPTIONS} | dict(options)
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    if draft is not None and draft != NGRAM:
        try:
            sources["draft"] = check_draft_source(draft)
        except ModelError:
            if not given["draft_rank"]:
                raise
            sources["draft"] = draft  # the path may be there where it is loaded
    cache_options = check_cache_options(*(given[name] for name in _CACHE_OPTIONS))
    if given["max_streams"] is not None:
        check_integer("max_streams", given["max_streams"], 1, or_auto=True)
    check_integer("max_batch", given["max_batch"], 1)
    check_integer("prefix_cache_bytes", given["prefix_cache_bytes"], 0)
    check_integer("prefix_cache_dir_bytes", given["prefix_cache_dir_bytes"], 0)
    if given["prefix_cache_dir"] is not None:
        check_folder(given["prefix_cache_dir"])
    keywords_of(given["defaults"], "defaults")
    check_template_args(given["chat_template_args"])
    if not isinstance(given["tune_mlx"], bool):
        raise SettingsError(f"tune_mlx must be True or False, got {shown(given['tune_mlx'])}")
    if given["work_ahead"] not in WORK_AHEAD:
        raise SettingsError(
            f"work_ahead must be one of {', '.join(map(repr, WORK_AHEAD))}, got {shown(given['work_ahead'])}"
        )
    check_group(given["group"], sources["target"], sources.get("draft"), given["draft_rank"])
    return sources, cache_options


async def _load_draft(
    target_loaded: Loaded,
    target_worker: Worker,
    options: CacheOptions,
    events: Events,
    prices: Prices,
    stack: AsyncExitStack,
    draft: Source,
) -> LoadedDrafter:
    """Load a drafter into an open runtime; see `runtime.engine.drafter_slot.Load`."""
    if draft == NGRAM:
        prices.forget_drafter()
        return "ngram"
    source = check_draft_source(draft)
    check_drafter(source)
    worker = await stack.enter_async_context(ThreadWorker("draft", events, may_be_given_up=True))
    drafter = await load_drafter_onto(worker, source, options, target_loaded, None, stack)
    _warn_if_too_large((target_loaded.model, drafter))
    stack.enter_context(drafter.evaluating_layers())
    prices.forget_drafter()
    await _time_models((target_loaded.model, target_worker), (drafter, worker), prices)
    return drafter, worker


async def _probe_sharing(model: MLXModel, worker: Worker) -> bool:
    """Find out whether texts can share passes, so that no stream waits for that."""
    try:
        with interrupts_unwrapped():
            obstacle = await worker.run(Job("warm-up", model.sharing_obstacle))
    except JobError as error:
        obstacle = str(error)
    if obstacle is not None:
        logger.info("streams take turns at the target: %s", obstacle)
    return obstacle is None


async def _time_models(target: tuple[Model, Worker], draft: tuple[Model, Worker], prices: Prices) -> None:
    """Time both models, so that the lookahead policy begins with measured prices."""
    try:
        with interrupts_unwrapped():
            await warm_up(target, draft, prices)
    except JobError as error:
        # Streams will meet the same error, and report it as that of their model.
        logger.info("the models could not be timed: %s", error)


async def keep_open(
    target: Source = MISSING,
    draft: Source | None = None,
    *,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[OpenOptions],
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


def _warn_if_too_large(models: Iterable[MLXModel | TranslatedModel | TrainedDrafter | RemoteDrafter]) -> None:
    if (limit := recommended_working_set()) is None:
        return
    # One module may be target and draft model.
    distinct = {id(model.module): model for model in models if not isinstance(model, RemoteDrafter)}
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
