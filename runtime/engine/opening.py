"""Opening a runtime: what was asked for is checked, the models are loaded and timed, and the actors go to work."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import outcome
import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.actor import PREFIX_CACHE_BYTES
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.model import Model
from actors.warm_up import warm_up
from actors.workers.worker import Job, JobError, ThreadWorker, Worker
from protocol.errors import WrongEventLoopError
from protocol.prices import Prices
from protocol.settings import MISSING, NGRAM, SettingsLike, keywords_of
from protocol.trace import Actor, Event
from protocol.validation import check_integer
from runtime.engine.drafter_slot import LoadedDrafter
from runtime.engine.nursery import interrupts_unwrapped
from runtime.engine.runtime import Events, Runtime, running
from runtime.generation.text import check_vocabularies, copy_of
from runtime.loading.model_sources import (
    Device,
    Loaded,
    Source,
    check_cache_options,
    check_device,
    check_source,
    check_unknown,
    load_onto,
)
from runtime.tracing.trace_files import Recorder, TimelineFile, Trace, check_trace

logger = logging.getLogger("outrider")


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open(
    target: Source = MISSING,
    draft: Source | None = None,
    *,
    target_device: Device = None,
    draft_device: Device = None,
    rewind: str = "auto",
    max_kv_size: int | None = None,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    max_streams: int | None = None,
    prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    defaults: SettingsLike | None = None,
    trace: Trace = None,
    **unknown: Any,
) -> AsyncIterator[Runtime]:
    """Load a target and a draft model, and keep them at work until the block is left.

    Args:
        target: a path or hub id for `mlx_lm.load`, or `(model, tokenizer)` already built. With None for
            a tokenizer, prompts are token ids and texts stay empty.
        draft: likewise; or "ngram", which drafts without a model, by looking up what came after the same words
            earlier in the prompt and the text; or None for plain decoding through the same machinery.
        target_device, draft_device: "cpu", "gpu", an MLX device, or None for MLX's default.
        rewind: how caches are put right after a rejection: "auto" takes, before each round, the first that
            every layer's cache has at that moment of *trim* (drop the tail), *checkpoint* (restore the state
            from before the round, and feed what was accepted again in front of the next window) and *none*
            (feed one committed token at a time); naming one insists on it.
        max_kv_size: most tokens that a cache keeps, >= 5, for models that make no caches of their own; the
            oldest but the first four are forgotten. None for no bound.
        kv_bits: quantise key-value caches to 2, 3, 4, 5, 6 or 8 bits; None does not.
        kv_group_size: quantisation group, 32, 64 or 128.
        quantized_kv_start: quantise once a cache holds so many tokens, >= 0.
        max_streams: most streams that the models work on at the same time, >= 1, which bounds the memory for caches;
            further ones wait in the order of their calls. None for no bound.
        prefix_cache_bytes: most memory that each of the two models may take for caches of texts that are over, for
            streams with `reuse_prefix`, >= 0; what was used least recently goes first. 0 keeps nothing.
        defaults: settings of every stream that is not given others: a `Settings`, or a mapping of some by name. A
            logits processor among them is shared by all streams.
        trace: the path of a file to write: Chrome trace JSON, for Perfetto or chrome://tracing, or where the name
            ends in .html the timeline as a page. It is whole once the block is left, for whatever reason. Or a
            function that is called in trio's thread with each `Span` and `Instant`, and should return quickly.
        **unknown: refused.

    Yields: a `Runtime`, which is also what `runtime.stream` uses in this task and its children.

    Raises: before the block is entered, with nothing left half open:
        SettingsError: the target is missing, or an option is unknown or out of its range.
        ModelError: a model cannot be loaded (the original error is the cause), or its caches do not have the
            way to rewind that was insisted on.
        VocabularyMismatchError: target and draft do not share a vocabulary.

    Cancellation: leaving the block ends every stream, waits for the forward passes that are running (at
    most one a model), and joins the threads, also while being cancelled. While loading, it waits for the
    load.
    """
    if not trio.lowlevel.in_trio_task():
        raise WrongEventLoopError(
            "runtime.open is for trio; under asyncio use runtime.aio.open, without an event loop runtime.open_sync"
        )
    check_unknown(unknown, OPTIONS)
    sources: dict[Actor, Source] = {"target": check_source("target", target)}
    devices: dict[Actor, mx.Device | None] = {
        "target": check_device("target", target_device),
        "draft": check_device("draft", draft_device),
    }
    if draft is not None and draft != NGRAM:
        sources["draft"] = check_source("draft", draft)
    options = check_cache_options(rewind, max_kv_size, kv_bits, kv_group_size, quantized_kv_start)
    if max_streams is not None:
        check_integer("max_streams", max_streams, 1)
    check_integer("prefix_cache_bytes", prefix_cache_bytes, 0)
    keywords_of(defaults, "defaults")
    events = Events()
    listener = check_trace(trace)

    async with AsyncExitStack() as stack:
        if isinstance(listener, Recorder) and listener is not trace:
            # First in, last out: a trace has the last of what the workers do.
            await stack.enter_async_context(listener)
        if listener is not None:
            events.listen(_harmless(listener))
        stack.enter_context(wired_memory())
        drafting = await stack.enter_async_context(AsyncExitStack())  # what is left with the drafter
        workers = {
            role: await (drafting if role == "draft" else stack).enter_async_context(
                ThreadWorker(role, devices[role], events, may_be_given_up=role == "draft")
            )
            for role in sources
        }
        loaded: dict[Actor, outcome.Outcome[Loaded]] = {}

        async def load(role: Actor) -> None:
            loaded[role] = await outcome.acapture(load_onto, workers[role], role, sources[role], options)

        with interrupts_unwrapped():
            async with trio.open_nursery() as nursery:
                for role in sources:
                    nursery.start_soon(load, role)
        ours = loaded["target"].unwrap()
        theirs = loaded["draft"].unwrap() if "draft" in loaded else None
        if isinstance(listener, TimelineFile):
            listener.tokenizer = ours.tokenizer
        stack.enter_context(ours.model.evaluating_layers())
        if theirs is not None:
            drafting.enter_context(theirs.model.evaluating_layers())
        if theirs is not None and ours.tokenizer is not None and theirs.tokenizer is not None:
            await _compare(workers["draft"], ours.tokenizer, theirs.tokenizer)
        tokenizer = await workers["target"].run(Job("load", partial(copy_of, ours.tokenizer)))
        prices = Prices()
        if theirs is not None:
            await _measure((ours.model, workers["target"]), (theirs.model, workers["draft"]), prices)
        async with running(
            (ours.model, workers["target"]),
            (theirs.model, workers["draft"]) if theirs is not None else NGRAM if draft == NGRAM else None,
            tokenizer=tokenizer,
            shared_tokenizer=ours.tokenizer,
            events=events,
            prices=prices,
            max_streams=max_streams,
            prefix_cache_bytes=prefix_cache_bytes,
            defaults=defaults,
            draft_resources=drafting,
            load_draft=partial(_load_draft, ours, workers["target"], options, events, prices),
        ) as runtime:
            # Whoever detaches the drafter has its memory back, so nothing here may hold on to it.
            del draft, theirs
            loaded.clear()
            for kept in (workers, sources):
                kept.pop("draft", None)
            yield runtime


OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(open).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
)


async def _load_draft(
    ours: Loaded,
    target_worker: Worker,
    options: CacheOptions,
    events: Events,
    prices: Prices,
    stack: AsyncExitStack,
    draft: Source,
    draft_device: Device,
) -> LoadedDrafter:
    """A drafter for a runtime that is open; see `runtime.engine.drafter_slot.Load`."""
    if draft == NGRAM:
        prices.forget_drafter()
        return "ngram"
    source, device = check_source("draft", draft), check_device("draft", draft_device)
    worker = await stack.enter_async_context(ThreadWorker("draft", device, events, may_be_given_up=True))
    theirs = await load_onto(worker, "draft", source, options)
    stack.enter_context(theirs.model.evaluating_layers())
    if ours.tokenizer is not None and theirs.tokenizer is not None:
        await _compare(worker, ours.tokenizer, theirs.tokenizer)
    prices.forget_drafter()
    await _measure((ours.model, target_worker), (theirs.model, worker), prices)
    return theirs.model, worker


async def _measure(target: tuple[Model, Worker], draft: tuple[Model, Worker], prices: Prices) -> None:
    """What both models cost, for the rules to begin with."""
    try:
        with interrupts_unwrapped():
            await warm_up(target, draft, prices)
    except JobError as error:
        # Streams will meet the same error, where it can be told whose it is.
        logger.info("the models could not be timed: %s", error)


async def _compare(worker: Worker, ours: TokenizerWrapper, theirs: TokenizerWrapper) -> None:
    try:
        await worker.run(Job("load", partial(check_vocabularies, ours, theirs)))
    except JobError as error:
        raise (error.__cause__ or error) from None


async def serve(
    target: Source = MISSING,
    draft: Source | None = None,
    *,
    task_status: trio.TaskStatus[Runtime] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """`open` as a task: `rt = await nursery.start(runtime.serve, target, draft)`. `await rt.aclose()` ends it.

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


def _harmless(trace: Callable[[Event], None]) -> Callable[[Event], None]:
    """A user's trace function that cannot take the runtime down; after its first error it is left out."""
    failed = False

    def call(event: Event) -> None:
        nonlocal failed
        if failed:
            return
        # Somebody else's code, called in the middle of ours: whatever it raises, generation goes on.
        try:
            trace(event)
        except Exception:
            failed = True
            logger.exception("the trace function failed on %r and is not called again", event)

    return call
