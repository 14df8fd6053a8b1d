"""The actors at work: a runtime over models and workers that are there, and `stream` on the runtime in use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Unpack

import trio
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.drafters.draft_actor import DraftActor
from actors.drafters.drafter import MakePolicy, policy_by_settings
from actors.drafters.lookup_actor import LookupActor
from actors.model import Model
from actors.persistence.saved_sequence import SavableModel
from actors.remote.remote_drafter import LoadedElsewhere, RemoteDrafter
from actors.target.target_actor import TargetActor
from actors.workers.worker import Worker
from protocol.copy_corpus import CopyCorpus
from protocol.errors import NoRuntimeError, OutriderError, RuntimeClosedError
from protocol.open_options import OpenOptions
from protocol.prices import Prices
from protocol.settings import NGRAM, SettingsLike
from protocol.settings_keywords import SettingsArguments
from protocol.target_queue import TargetQueue
from runtime.engine.drafter_slot import DrafterActor, DrafterSlot, Load, LoadedDrafter
from runtime.engine.events import Events
from runtime.engine.nursery import BackgroundNursery
from runtime.engine.open_options import OpenArguments
from runtime.engine.runtime import CLOSED, Runtime
from runtime.generation.text import Prompt
from runtime.generation.token_stream import TokenStream
from runtime.persistence.disk_prefix_cache import DiskPrefixCache
from runtime.persistence.prefix_files import check_folder

_current: ContextVar[Runtime | None] = ContextVar("outrider_runtime", default=None)


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
    """A runtime over loaded models and running workers.

    Args:
        target, draft: a model and its worker; real ones, or scripted ones in simulated time. The caller enters and
            leaves the workers. "ngram" drafts by prompt lookup, and None does not draft. Or a drafter elsewhere.
        shared_tokenizer: what `Runtime.tokenizer` returns; `tokenizer` if None.
        events: where the workers announce their spans.
        prices: what the models are known to cost; nothing if None.
        make_policy: makes the policy that decides how far a session is drafted ahead.
        draft_resources: closed once the drafter is detached, or the runtime is left.
        load_draft: loads a drafter to attach; None if none can be attached.
        chains: see `DraftActor`.
        **options: those of `open` that are about streams and prefix caches; `max_streams` is a number or None.

    Cancellation: as `open`.
    """
    events, prices, given = events or Events(), prices or Prices(), OpenOptions(**options)
    assert given.max_streams != "auto", "decided by who knows the models"
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

        def make_drafter(draft: LoadedDrafter) -> DrafterActor:
            if draft == NGRAM:
                return LookupActor(
                    events, prices, target[1].clock, target=target_actor.mailbox, make_policy=make_policy
                )
            if isinstance(draft, LoadedElsewhere):
                return RemoteDrafter(
                    draft,
                    events,
                    prices,
                    target[1].clock,
                    target=target_actor.mailbox,
                    target_vocab_size=target[0].vocab_size,
                )
            actor = DraftActor(
                *draft,
                events,
                prices,
                target=target_actor.mailbox,
                target_vocab_size=target[0].vocab_size,
                make_policy=make_policy,
                prefix_cache_bytes=given.prefix_cache_bytes,
                target_queue=target_queue,
                chains=chains,
                max_batch=given.max_batch,
            )
            keep_on_disk(actor)
            return actor

        drafter = DrafterSlot(nursery, target_actor, make_drafter, load_draft)
        if draft is not None:
            await drafter.put(draft, draft_resources or AsyncExitStack())
        del draft  # the slot holds it, until it is detached
        keep_on_disk(target_actor)
        if (store := target_actor.prefix_cache.store) is not None:
            nursery.start_soon(store.run)
        await nursery.start(target_actor.serve)
        runtime = Runtime(
            target_actor,
            drafter,
            tokenizer,
            events,
            prices,
            nursery,
            given.max_streams,
            tokenizer if shared_tokenizer is None else shared_tokenizer,
            given.defaults,
            CopyCorpus(given.copy_corpus) if given.copy_corpus else None,
        )
        end = partial(runtime._sessions.close, RuntimeClosedError(CLOSED))
        # A cancellation from further out ends the actors first; the block ends when it gets to it.
        target_actor.when_over(end)
        before = _current.get()
        _current.set(runtime)
        try:
            yield runtime
        finally:
            _current.set(before)
            end()


def stream(prompt: Prompt, settings: SettingsLike | None = None, **overrides: Unpack[SettingsArguments]) -> TokenStream:
    """`Runtime.stream`, on the runtime that the current task is running under.

    Raises: NoRuntimeError: there is none; and what `Runtime.stream` raises.
    """
    runtime = _current.get()
    if runtime is None:
        raise NoRuntimeError("no runtime is open here; use this inside `async with runtime.open(...)`")
    return runtime.stream(prompt, settings, **overrides)
