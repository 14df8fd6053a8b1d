"""A drafter on a rank of its own: opened from rank 0, and loaded and served at that rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import trio
from mlx.nn.layers.base import Module
from mlx_lm.tokenizer_utils import TokenizerWrapper

from actors.distributed.draft_rank_link import DraftRankLink
from actors.distributed.drafting.drafting_model import DraftingModel
from actors.distributed.drafting.remote_drafter import RemoteDrafter
from actors.distributed.rank_address import is_ring
from actors.distributed.rank_group import RankGroup
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from actors.translated.translated_model import TranslatedModel
from actors.workers.simulated_worker import SimulatedWorker
from actors.workers.worker import Job, JobError, Worker
from protocol.draft_rank_messages import (
    CloseDrafter,
    DrafterNotOpened,
    DrafterOpened,
    DraftRequest,
    GivenFeatures,
    OpenDrafter,
)
from protocol.errors import ModelError, OutriderError, RankError, SettingsError, VocabularyMismatchError
from protocol.rank_messages import CloseTarget
from protocol.validation import check_integer
from runtime.loading.model_files import folder_of
from runtime.loading.model_sources import (
    Loaded,
    Source,
    check_draft_source,
    load_draft_onto,
    read_lazily,
)

# --- at rank 0 ------------------------------------------------------------------------------------

# What a rank that cannot load its drafter may say.
_ERRORS = {error.__name__: error for error in (ModelError, SettingsError, VocabularyMismatchError)}


def check_draft_rank(group: RankGroup, draft_rank: Any, *, has_model: bool) -> int | None:
    """The rank that is to draft; None for rank 0, which drafts beside its part of the target.

    Args:
        group: the ranks.
        draft_rank: the option of `open`.
        has_model: whether the drafter is one that can be loaded there.

    Raises: SettingsError: there is no such rank, it would have nothing to load, or it cannot be left out of the others.
    """
    if draft_rank is not None:
        check_integer("draft_rank", draft_rank, 0, group.size - 1)
    if not draft_rank:
        group.check_mlx(None)
        return None
    if not has_model:
        raise SettingsError.of(
            "{draft_rank=} is where a draft model is loaded, and there is none; give one as {draft}, or leave "
            "{draft_rank} out",
            draft_rank=draft_rank,
        )
    if len(group.target_ranks(draft_rank)) > 1:
        if not is_ring():
            raise SettingsError.of(
                "{draft_rank=} leaves several ranks to the target, and only MLX's ring can connect them without that "
                'one; use the backend "ring", or two ranks',
                draft_rank=draft_rank,
            )
        group.check_mlx(draft_rank)
    return int(draft_rank)


async def load_drafter_onto(
    worker: Worker,
    source: Source,
    options: CacheOptions,
    target: Loaded,
    group: RankGroup | None,
    stack: AsyncExitStack,
) -> MLXModel | TranslatedModel | TrainedDrafter | RemoteDrafter:
    """Load a drafter on a worker's thread, or have the rank load it that drafts.

    Args:
        worker: of the drafter.
        source: the drafter.
        options: of its caches.
        target: what it drafts for.
        group: the ranks, if there are several.
        stack: ends the target's recording of features, and releases the drafter at its rank.

    Raises: as `load_draft_onto`, and RankError: the rank that drafts is lost.
    """
    stack.callback(target.model.record_features, None)
    if group is None or group.drafter is None:
        return (await load_draft_onto(worker, source, options, target)).model
    opened = partial(_open_remotely, group.drafter, options, target.model.vocab_size)
    try:
        drafter = await worker.run(Job("load", opened))
    except JobError as error:
        raise (error.__cause__ or error) from None
    stack.callback(drafter.close)
    if drafter.feature_layers is not None:
        target.model.record_features(drafter.feature_layers)
    return drafter


def _open_remotely(link: DraftRankLink, options: CacheOptions, target_vocab_size: int) -> RemoteDrafter:
    link.send(OpenDrafter(attrs.asdict(options), target_vocab_size))
    while not isinstance(answer := link.receive(), DrafterOpened):
        if isinstance(answer, DrafterNotOpened):
            kind = _ERRORS.get(answer.kind, RankError)
            raise kind(f"rank {link.rank} cannot load the drafter: {answer.reason}")
    return RemoteDrafter(link, answer)


# --- at the rank that drafts ----------------------------------------------------------------------


def drafting_at(target: Source, draft: Source | None, group: RankGroup) -> Callable[[], None]:
    """What drafts for rank 0 until it closes the target, to be called on the drafter's thread.

    Args: as for `runtime.follow`.
    """
    for source in (target, draft):
        if isinstance(source, tuple):
            mx.eval(source[0])  # on the caller's thread, which may have made lazy arrays
    return partial(_draft, target, draft, group)


def _draft(target: Source, draft: Source | None, group: RankGroup) -> None:
    drafter: DraftingModel | None = None
    while not isinstance(message := group.receive()[1], CloseTarget):
        match message:
            case OpenDrafter():
                drafter = _load(target, draft, message, group)
            case CloseDrafter():
                drafter = None
            case GivenFeatures() if drafter is not None:
                drafter.take(message)
            case DraftRequest() if drafter is not None:
                group.send(drafter.answer(message))
            case _:
                raise RankError(f"rank {group.rank} drafts, and rank 0 sent {type(message).__name__}")


def _load(target: Source, draft: Source | None, message: OpenDrafter, group: RankGroup) -> DraftingModel | None:
    """Load the drafter and tell rank 0. Returns: None if it cannot be loaded."""
    parts = _TargetElsewhere(target, message.target_vocab_size)
    options = CacheOptions(**message.cache_options)
    try:
        if draft is None:
            raise SettingsError("it was given none; call follow(target, group, draft)")
        # Its jobs take no simulated time, and run at once on this thread, which is to be the model's.
        worker = SimulatedWorker("draft", lambda _: 0.0)
        loaded = trio.run(load_draft_onto, worker, check_draft_source(draft), options, parts)
    except OutriderError as error:
        group.send(DrafterNotOpened(type(error).__name__, str(error)))
        return None
    group.send(DrafterOpened(loaded.model.vocab_size, loaded.model.context_length, parts.feature_layers))
    return DraftingModel(loaded.model)


class _TargetElsewhere:
    """A target whose passes run at other ranks, as far as its drafter needs it here; see `DraftedTarget`."""

    def __init__(self, source: Source, vocab_size: int) -> None:
        self._source = source
        self.vocab_size = vocab_size
        self.feature_layers: tuple[int, ...] | None = None

    @cached_property
    def _read(self) -> tuple[Module, TokenizerWrapper | None]:
        """The model and its tokenizer. Weights are read where the drafter uses them."""
        return read_lazily(self._source)

    @property
    def model(self) -> _TargetElsewhere:
        return self

    @property
    def module(self) -> Module:
        return self._read[0]

    @property
    def tokenizer(self) -> TokenizerWrapper | None:
        return self._read[1]

    @property
    def folder(self) -> Path | None:
        return folder_of(self._source)

    def record_features(self, layer_ids: Sequence[int] | None) -> None:
        """The ranks of the target do it, once they are told of the layers."""
        self.feature_layers = None if layer_ids is None else tuple(layer_ids)
