"""Drafting for another process: loading a drafter over a link, and drafting at its other end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import trio

from actors.drafters.drafter import policy_by_settings
from actors.mlx.cache_options import CacheOptions
from actors.remote.drafting_end import DraftingEnd
from actors.remote.link import Link, LinkLostError
from actors.remote.remote_drafter import LoadedElsewhere
from actors.trained.drafter_model import TrainedDrafter
from actors.warm_up import time_drafter
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError
from protocol.drafter_wire import DrafterLoaded, DrafterNotLoaded, DraftNews, LoadDrafter, decode, encode
from protocol.errors import ModelError, OutriderError, ProtocolError, SettingsError, VocabularyMismatchError
from protocol.open_options import OpenOptions
from protocol.settings import AUTO_DRAFT
from runtime.loading.model_files import folder_of
from runtime.loading.model_sources import DraftedTarget, ModelSource, check_draft_source, load_draft_onto, read_lazily

logger = logging.getLogger("outrider")

# Errors that the other end may report about a drafter that it cannot load.
_ERRORS = {error.__name__: error for error in (ModelError, SettingsError, VocabularyMismatchError)}

# The options of `open` that a drafter needs, beside those of its caches.
OPTIONS = ("max_batch", "prefix_cache_bytes", "work_ahead")


async def load_elsewhere(link: Link, load: LoadDrafter, lost: type[OutriderError]) -> LoadedElsewhere:
    """Have the other end of a link load a drafter. That end speaks first, with a heartbeat. Raises: why it cannot; or
    `lost`. Cancellation: the link can no longer be used.
    """
    news: list[tuple[float, DraftNews]] = []
    answer: DrafterLoaded | DrafterNotLoaded
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        try:
            while isinstance(message := decode(await link.receive()), DraftNews):
                if not news:
                    link.send(encode(load))
                news.append((time.perf_counter(), message))
            if not isinstance(message, DrafterLoaded | DrafterNotLoaded):
                raise ProtocolError(f"{link.name} was to load it, and sent {type(message).__name__}")
            answer = message
        except (LinkLostError, ProtocolError) as error:
            # Collected here, since the nursery would wrap it in an exception group.
            answer = DrafterNotLoaded("", str(error))
        nursery.cancel_scope.cancel()
    if isinstance(answer, DrafterNotLoaded):
        what = f"{link.name} cannot load the drafter" if answer.kind else "the drafter is lost"
        raise _ERRORS.get(answer.kind, lost)(f"{what}: {answer.reason}")
    return LoadedElsewhere(link, answer, tuple(news))


async def draft_for(
    link: Link,
    sources: Callable[[LoadDrafter], tuple[ModelSource | None, ModelSource | None]],
    *,
    forwards_warnings: bool = False,
) -> None:
    """Load the drafter that a runtime at the other end of a link asks for, and draft until it closes the link.
    `sources` gives the target and the drafter of a request, None for one that is not known here. With
    `forwards_warnings`, the runtime logs this end's.

    Raises: ProtocolError: the other end has sent nonsense; and what `Link.receive` raises.
    """
    end = DraftingEnd(link, time.perf_counter)
    if forwards_warnings:
        logger.addHandler(_Forwarding(end))
    ended: OutriderError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(link.run)
        nursery.start_soon(end.beat)
        try:
            load = decode(await link.receive())
            if not isinstance(load, LoadDrafter):
                raise ProtocolError(f"a drafter was to be loaded first, and {type(load).__name__} has come")
            end.wants_instants = load.traces
            async with ThreadWorker("draft", end, may_be_given_up=True) as worker:
                await _load_and_draft(end, worker, load, sources)
        except OutriderError as error:
            ended = error  # collected here, since the nursery would wrap it in an exception group
        nursery.cancel_scope.cancel()
    if ended is not None and not isinstance(ended, LinkLostError):
        raise ended


async def _load_and_draft(
    end: DraftingEnd,
    worker: ThreadWorker,
    load: LoadDrafter,
    sources: Callable[[LoadDrafter], tuple[ModelSource | None, ModelSource | None]],
) -> None:
    try:
        options = OpenOptions(**{name: load.options[name] for name in OPTIONS})
        target, draft = sources(load)
        if draft is None or draft == AUTO_DRAFT:
            raise SettingsError("it was given none by name; call follow(target, group, draft)")
        source = check_draft_source(draft, target)
        module, tokenizer, folder = None, None, None if target is None else folder_of(target)
        try:
            if target is not None:  # Its weights are read where the drafter uses them.
                module, tokenizer = await worker.run(Job("load", partial(read_lazily, target)))
        except JobError as error:
            raise (error.__cause__ or error) from None
        # The target records features once it is told.
        drafted = DraftedTarget(module, load.vocab_size, tokenizer, folder, record_features=lambda _: None)
        loaded = await load_draft_onto(worker, source, CacheOptions(**load.cache_options), drafted)
    except (OutriderError, KeyError, TypeError) as error:
        end.link.send(encode(DrafterNotLoaded(type(error).__name__, str(error))))
        return
    try:
        await time_drafter((loaded.model, worker), end.prices)
    except JobError as error:
        logger.info("the draft model could not be timed: %s", error)  # its sessions will meet the same error
    # Without `evaluating_layers`: no other model computes in this process.
    layers = loaded.model.feature_layers if isinstance(loaded.model, TrainedDrafter) else None
    end.link.send(encode(DrafterLoaded(loaded.model.vocab_size, loaded.model.context_length, layers)))
    await end.serve(
        loaded.model,
        worker,
        vocab_size=load.vocab_size,
        make_policy=partial(policy_by_settings, work_ahead=options.work_ahead),
        max_batch=options.max_batch,
        cache_bytes=options.prefix_cache_bytes,
    )


class _Forwarding(logging.Handler):
    """Has the runtime log what would be logged here."""

    def __init__(self, end: DraftingEnd) -> None:
        super().__init__(logging.WARNING)
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        self._end.warnings.append(record.getMessage())
