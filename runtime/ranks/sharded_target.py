"""A target that is sharded over several ranks: loaded on all, compared, and made at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import mlx.core as mx

from actors.distributed.leading_model import LeadingModel
from actors.distributed.rank_group import RankGroup
from actors.distributed.sharding import Shard, difference, is_sharded_in_place, load_shard, shard_in_place
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import tokenizer_wrapper
from actors.workers.worker import Job, JobError, Worker
from protocol.errors import ModelError, OutriderError, RankError, SettingsError
from protocol.rank_messages import Loaded as PartLoaded
from protocol.rank_messages import OpenTarget, Operation, Operations
from runtime.loading.model_sources import Loaded, Source, folder_of, layer_evaluation_by_environment
from runtime.loading.model_spec import ModelSpec

logger = logging.getLogger("outrider")

# Between two messages to the log about ranks that have not loaded their part, in seconds.
_REPORT_S = 10.0

# Announced once all ranks have loaded the same model: each checks its part, which takes passes of all.
BEGIN = "begin"


def check_sharded(source: Source) -> None:
    """Raises: SettingsError: the source has options that a sharded model cannot be loaded with."""
    if (
        isinstance(source, ModelSpec)
        and not attrs.evolve(source, tokenizer_config={}, trust_remote_code=False).is_plain
    ):
        raise SettingsError(
            "a sharded target cannot be loaded with an adapter, a revision, quantize or model_config; fuse or convert "
            "it with mlx_lm first, and give its directory"
        )


def check_drafter(draft: Source | None, target: Source | None = None) -> None:
    """Check a draft model, beside a target that is given in place, or is open.

    Raises: SettingsError: its passes would need all ranks, and only rank 0 drafts.
    """
    if not isinstance(draft, tuple):
        return
    if is_sharded_in_place(draft[0]) or (isinstance(target, tuple) and draft[0] is target[0]):
        raise SettingsError(
            "the draft model is a module that is sharded over several ranks, and only rank 0 drafts; build it once more"
        )


def read_shard(source: Source, group: RankGroup) -> Callable[[], Shard]:
    """What loads this rank's part, to be called on the thread that will use it.

    Raises: SettingsError: as `check_sharded`.
    """
    check_sharded(source)
    assert group.mlx is not None
    if isinstance(source, tuple):
        built, tokenizer = source
        mx.eval(built)  # on the caller's thread, which may have made lazy arrays
        return partial(shard_in_place, built, None if tokenizer is None else tokenizer_wrapper(tokenizer), group.mlx)
    options: dict[str, Any] = {}
    if isinstance(source, ModelSpec):
        options = {"tokenizer_config": dict(source.tokenizer_config), "trust_remote_code": source.trust_remote_code}
    return partial(load_shard, str(source), group.mlx, partial(folder_of, source), **options)


async def load_sharded_onto(worker: Worker, source: Source, options: CacheOptions, group: RankGroup) -> Loaded:
    """Load rank 0's part on a worker's thread, while the other ranks load theirs.

    Raises:
        SettingsError: as `check_sharded`.
        ModelError: the model cannot be loaded or sharded; the other ranks are told.
        RankError: another rank cannot load its part, or has loaded another model.
    """
    read, evaluation = read_shard(source, group), layer_evaluation_by_environment()
    name = type(source[0]).__name__ if isinstance(source, tuple) else str(source)
    group.send(OpenTarget(attrs.asdict(options)))

    def load() -> tuple[LeadingModel, Shard]:
        shard = read()
        _compare(shard, group)
        group.send(Operations((Operation(BEGIN),)))
        return LeadingModel(shard.model, options, group, f"target {name!r}", evaluation), shard

    try:
        model, shard = await worker.run(Job("load", load))
    except JobError as error:
        cause = error.__cause__
        if not isinstance(cause, RankError):
            group.fail(f"rank 0 cannot load the target: {cause}")
        if isinstance(cause, OutriderError):
            raise cause from None
        raise ModelError(f"cannot load target {name!r}: {cause}") from cause
    return Loaded(model, shard.tokenizer, folder_of(source))


def _compare(shard: Shard, group: RankGroup) -> None:
    """Wait until all ranks have loaded their parts, and compare the models.

    Raises: RankError: one has another model, or has failed.
    """
    missing = set(range(1, group.size))
    while missing:
        try:
            rank, message = group.receive(_REPORT_S)
        except TimeoutError:
            logger.info("waiting for rank %s to load its part of the target", ", ".join(map(str, sorted(missing))))
            continue
        if isinstance(message, PartLoaded):
            missing.discard(rank)
            if (different := difference(shard.parts, message.parts)) is not None:
                raise group.fail(f"rank {rank} has loaded another model or stage than rank 0: {different}")
