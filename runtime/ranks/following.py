"""Following: a rank other than 0 loads its part of the target and repeats what rank 0 announces, or drafts for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import mlx.core as mx
import trio

from actors.distributed.rank_group import RankGroup
from actors.distributed.sharded_model import FollowingModel, ShardedModel
from actors.distributed.sharding import Shard
from actors.mlx.cache_options import CacheOptions
from actors.mlx.memory import wired_memory
from protocol.errors import RankError, SettingsError
from protocol.rank_messages import CloseTarget, ConnectRanks, OpenTarget, Present, RankLoaded, RankOperations
from runtime.loading.model_sources import ModelSource, check_source
from runtime.ranks.sharded_target import BEGIN, check_sharded, read_shard
from runtime.remote.drafting import draft_for

logger = logging.getLogger("outrider")


def follow(
    target: ModelSource, group: RankGroup, draft: ModelSource | None = None, *, wire_memory: bool = True
) -> None:
    """Follow rank 0: load this rank's part of the target, and repeat each of its operations until rank 0 closes it.

    If rank 0 has named this rank as its `draft_rank`, this rank loads the drafter instead, and drafts.

    This blocks for as long as the runtime at rank 0 lives; a process may follow several, one after another. All options
    are rank 0's.

    Args:
        target: the model that rank 0 opens, as for `open`; paths may differ between machines. The rank that drafts
            reads its tokenizer, and the weights that a trained drafter shares with it.
        group: from `join_ranks`, on a rank other than 0.
        draft: the drafter that rank 0 opens, as for `open`; only the rank that drafts loads it.
        wire_memory: as for `open`, on this rank's machine.

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
    read, drafting = read_shard(source, group), drafting_at(source, draft, group)
    with wired_memory() if wire_memory else nullcontext():
        group.run("outrider-target", partial(_follow, read, drafting, group))


def _follow(read: Callable[[], Shard], drafting: Callable[[], None], group: RankGroup) -> None:
    """Load and repeat until the target is closed, on the model's thread; or draft. Raises: RankError: see `follow`."""
    name = "loading"
    with breaking(group, lambda: name):
        while not isinstance(opened := group.receive()[1], OpenTarget):
            logger.debug("rank %d has received %r before a target was opened", group.rank, opened)
        if opened.draft_rank == group.rank:
            name = "drafting"
            drafting()
            return
        if group.mlx is None:  # made with the other ranks of the target, once all are there
            group.send(Present())
            while not isinstance(group.receive()[1], ConnectRanks):
                continue
            group.connect_mlx(opened.draft_rank)
        shard, options = read(), CacheOptions(**opened.cache_options)
        group.send(RankLoaded(shard.parts))
        following: FollowingModel | None = None
        while not isinstance(message := group.receive()[1], CloseTarget):
            if not isinstance(message, RankOperations):
                raise RankError(f"rank {group.rank} follows a target, and rank 0 sent {type(message).__name__}")
            for operation in message.operations:
                name = operation.name
                if name == BEGIN:
                    following = FollowingModel(ShardedModel(shard.model, options, group, "the target"), group)
                else:
                    assert following is not None
                    following.run(operation)


def drafting_at(target: ModelSource, draft: ModelSource | None, group: RankGroup) -> Callable[[], None]:
    """A function that drafts for rank 0 until it closes the target, to be called on a thread of its own."""
    for source in (target, draft):
        if isinstance(source, tuple):
            mx.eval(source[0])  # on the caller's thread, which may have made lazy arrays

    async def draft_until_closed() -> None:
        with group.drafted_by(0):
            link = group.drafter
            assert link is not None
            await draft_for(link, lambda _: (target, draft))
            await link.is_over.wait()
        if not link.has_closed_target:
            group.check()

    return partial(trio.run, draft_until_closed)


@contextmanager
def breaking(group: RankGroup, doing: Callable[[], str]) -> Iterator[None]:
    """Break the group if anything is raised inside, where this rank was `doing` something: it is out of step then."""
    try:
        yield
    except RankError as error:
        raise group.fail(str(error)) from error
    # Whatever a model's code, or MLX, raises.
    except Exception as error:
        if isinstance(explained := group.explain(error, is_out_of_step=True), RankError):
            raise explained from error
        raise group.fail(f"rank {group.rank} failed in {doing()}: {type(error).__name__}: {error}") from error
