"""Following: a rank other than 0 loads its part of the target and repeats what rank 0 announces, or drafts for it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from actors.distributed.following_model import FollowingModel
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharding import Shard
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from actors.mlx.model import MLXModel
from protocol.errors import RankError, SettingsError
from protocol.rank_messages import CloseTarget, ConnectRanks, Loaded, OpenTarget, Operations, Present
from runtime.loading import mlx_environment
from runtime.loading.model_sources import Source, check_source
from runtime.ranks.draft_rank import drafting_at
from runtime.ranks.group_thread import breaking, run_in_group
from runtime.ranks.sharded_target import BEGIN, check_sharded, read_shard

logger = logging.getLogger("outrider")


def follow(target: Source, group: RankGroup, draft: Source | None = None) -> None:
    """Follow rank 0: load this rank's part of the target, and repeat each of its operations until rank 0 closes it.

    If rank 0 has named this rank as its `draft_rank`, it loads the drafter instead, and drafts.

    This blocks, for as long as the runtime at rank 0 lives; a process may follow several runtimes, one after another.
    All options are rank 0's.

    Args:
        target: the model that rank 0 opens, as for `open`; paths may differ between machines. The rank that drafts
            reads its tokenizer, and the weights that a trained drafter shares with it.
        group: from `join_ranks`, on a rank other than 0.
        draft: the drafter that rank 0 opens, as for `open`; only the rank that drafts loads it.

    Raises:
        SettingsError: the target is missing or has options that do not go with ranks, or this is rank 0.
        ModelError: there is no model at the path.
        RankError: a rank has ended, hangs, is out of step or has another model. This process should end then: a thread
            of it may be stuck in a collective for good.
    """
    if not isinstance(group, RankGroup) or group.rank == 0:
        raise SettingsError(f"follow() is for ranks other than 0, got {group!r}; rank 0 calls open(..., group=group)")
    source = check_source("target", target)
    if draft is None:  # this rank cannot be the one that drafts
        check_sharded(source)
    mlx_environment.tune()
    read, drafting = read_shard(source, group), drafting_at(source, draft, group)
    with wired_memory():
        run_in_group("outrider-target", lambda: _follow(read, drafting, group), group)


def _follow(read: Callable[[], Shard], drafting: Callable[[], None], group: RankGroup) -> None:
    """Load and repeat until the target is closed, on the model's thread; or draft.

    Raises: RankError: see `follow`.
    """
    name = "loading"
    with breaking(group, lambda: name):
        opened = _opened(group)
        if opened.draft_rank == group.rank:
            name = "drafting"
            drafting()
            return
        _connect(group, opened.draft_rank)
        shard, options = read(), CacheOptions(**opened.cache_options)
        group.send(Loaded(shard.parts))
        following: FollowingModel | None = None
        while not isinstance(message := group.receive()[1], CloseTarget):
            if not isinstance(message, Operations):
                raise RankError(f"rank {group.rank} follows a target, and rank 0 sent {type(message).__name__}")
            for operation in message.operations:
                name = operation.name
                if name == BEGIN:
                    following = FollowingModel(MLXModel(shard.model, options, "the target"), group)
                else:
                    assert following is not None
                    following.run(operation)


def _opened(group: RankGroup) -> OpenTarget:
    """Wait until rank 0 opens a target."""
    while not isinstance(message := group.receive()[1], OpenTarget):
        logger.debug("rank %d has received %r before a target was opened", group.rank, message)
    return message


def _connect(group: RankGroup, draft_rank: int | None) -> None:
    """Make MLX's group with the other ranks of the target, once all are there.

    Raises: RankError: MLX cannot, or a rank has failed.
    """
    if group.mlx is not None:
        return
    group.send(Present())
    while not isinstance(group.receive()[1], ConnectRanks):
        continue
    group.connect_mlx(draft_rank)
