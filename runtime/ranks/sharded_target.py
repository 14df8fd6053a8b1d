"""A target that is sharded over several ranks: loaded on all, compared, and made at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import attrs
import mlx.core as mx

from actors.distributed.rank_group import RankGroup
from actors.distributed.sharded_model import ShardedModel
from actors.distributed.sharding import Shard, difference, is_sharded_in_place, load_shard, shard_in_place
from actors.mlx.cache_options import CacheOptions
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import RankError, SettingsError
from protocol.rank_messages import ConnectRanks, OpenTarget, Present, RankOperation, RankOperations
from protocol.rank_messages import RankLoaded as PartLoaded
from runtime.loading.gguf.names import is_gguf
from runtime.loading.model_files import folder_of, load_errors, name_of
from runtime.loading.model_sources import Loaded, ModelSource, layer_evaluation_by_environment, load_onto, read_lazily
from runtime.loading.model_spec import ModelSpec
from runtime.loading.tokenizers import wrapped

logger = logging.getLogger("outrider")

# Seconds between two log messages about ranks that have not answered.
_REPORT_S = 10.0

# Announced once all ranks have loaded the same model: each checks its part, in passes that all take part in.
BEGIN = "begin"

M = TypeVar("M", Present, PartLoaded)


def check_sharded(source: ModelSource) -> None:
    """Raises: SettingsError: the source has options that a sharded model cannot be loaded with."""
    if (
        isinstance(source, ModelSpec)
        and not attrs.evolve(source, tokenizer_config={}, trust_remote_code=False).is_plain
    ):
        raise SettingsError(
            "a sharded target cannot be loaded with an adapter, a revision, quantize or model_config; fuse or "
            "convert it with mlx_lm first, and give its directory"
        )


def check_drafter(draft: ModelSource | None, target: ModelSource | None = None) -> None:
    """Raises: SettingsError: a draft model's passes would need all ranks, and only rank 0 drafts."""
    if not isinstance(draft, tuple):
        return
    if is_sharded_in_place(draft[0]) or (isinstance(target, tuple) and draft[0] is target[0]):
        raise SettingsError(
            "the draft model is a module that is sharded over several ranks, and only rank 0 drafts; build it once more"
        )


def read_shard(source: ModelSource, group: RankGroup) -> Callable[[], Shard]:
    """A function that loads this rank's part, to be called on the thread that will use it, once MLX's group is made."""
    if isinstance(source, tuple):
        mx.eval(source[0])  # on the caller's thread, which may have made lazy arrays

    def read() -> Shard:
        assert group.mlx is not None
        if isinstance(source, tuple) or is_gguf(source):
            return shard_in_place(*read_lazily(source), group.mlx)
        options: dict[str, Any] = {}
        if isinstance(source, ModelSpec):
            options = {"tokenizer_config": dict(source.tokenizer_config), "trust_remote_code": source.trust_remote_code}
        shard = load_shard(str(source), group.mlx, partial(folder_of, source), **options)
        return attrs.evolve(shard, tokenizer=wrapped(shard.tokenizer, f"target {name_of(source)!r}"))

    return read


async def load_target_onto(
    worker: Worker, source: ModelSource, options: CacheOptions, group: RankGroup | None
) -> Loaded:
    """Load a target on a worker's thread: all of it, or rank 0's part while the other ranks load theirs. Raises:
    ModelError: it cannot be loaded or sharded. RankError: another rank cannot, or has loaded another model.
    """
    if group is not None:
        group.send(OpenTarget(attrs.asdict(options), group.draft_rank))
    if group is None or len(group.target_ranks(group.draft_rank)) == 1:
        return await load_onto(worker, "target", source, options)
    read, evaluation = read_shard(source, group), layer_evaluation_by_environment()
    named = f"target {name_of(source)!r}"

    def load() -> tuple[ShardedModel, Shard]:
        if group.mlx is None:
            for _ in _from_each(group, Present, "follow"):
                continue
            group.send(ConnectRanks(), to_target=True)
            group.connect_mlx(group.draft_rank)
        shard = read()
        _compare(shard, group)
        group.send(RankOperations((RankOperation(BEGIN),)), to_target=True)
        return ShardedModel(shard.model, options, group, named, evaluation), shard

    with load_errors("target", source):
        try:
            model, shard = await worker.run(Job("load", load))
        except JobError as error:
            if not isinstance(error.__cause__, RankError):
                group.fail(f"rank 0 cannot load the target: {error.__cause__}")
            raise
    return Loaded(model, shard.tokenizer, folder_of(source))


def _compare(shard: Shard, group: RankGroup) -> None:
    """Wait until all ranks have loaded their parts. Raises: RankError: one has another model, or has failed."""
    for rank, message in _from_each(group, PartLoaded, "load its part of the target"):
        if (different := difference(shard.parts, message.parts)) is not None:
            raise group.fail(f"rank {rank} has loaded another model or stage than rank 0: {different}")


def _from_each(group: RankGroup, kind: type[M], do_it: str) -> Iterator[tuple[int, M]]:
    """Wait for each other rank of the target to send a message of a kind, and log which have not done so for long."""
    missing = set(group.target_ranks(group.draft_rank)) - {0}
    while missing:
        try:
            rank, message = group.receive(_REPORT_S)
        except TimeoutError:
            logger.info("waiting for rank %s to %s", ", ".join(map(str, sorted(missing))), do_it)
            continue
        if isinstance(message, kind):
            missing.discard(rank)
            yield rank, message
