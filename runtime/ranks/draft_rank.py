"""A drafter on a rank of its own: checks at rank 0, and drafting at that rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import trio

from actors.distributed.rank_address import is_ring
from actors.distributed.rank_group import RankGroup
from protocol.errors import SettingsError
from protocol.validation import check_integer
from runtime.loading.model_sources import Source
from runtime.remote.drafting import draft_for


def check_draft_rank(group: RankGroup, draft_rank: Any, *, has_model: bool) -> int | None:
    """The rank that is to draft; None for rank 0, which drafts beside its part of the target.

    Args:
        has_model: whether a drafter is named, which can be loaded there.

    Raises: SettingsError: there is no such rank, it would have nothing to load, or it cannot be left out of the others.
    """
    if draft_rank is not None:
        check_integer("draft_rank", draft_rank, 0, group.size - 1)
    if not draft_rank:
        group.check_mlx(None)
        return None
    if not has_model:
        raise SettingsError.of(
            "{draft_rank=} is where a draft model is loaded, and none is named; give one as {draft}, or leave "
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


def drafting_at(target: Source, draft: Source | None, group: RankGroup) -> Callable[[], None]:
    """What drafts for rank 0 until it closes the target, to be called on a thread of its own.

    Args: as for `runtime.follow`.
    """
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
