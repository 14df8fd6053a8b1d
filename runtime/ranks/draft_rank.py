"""A drafter on a rank of its own: checks at rank 0, and drafting at that rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import trio

from actors.distributed.draft_rank_link import frames
from actors.distributed.rank_address import is_ring
from actors.distributed.rank_group import RankGroup
from actors.remote.link import LinkLostError
from protocol.errors import RankError, SettingsError
from protocol.rank_messages import CloseTarget, DrafterFrame
from protocol.validation import check_integer
from runtime.loading.model_sources import Source
from runtime.ranks.drafting import draft_for

# How often a thread that waits for a message looks whether it is still wanted, in seconds.
_LOOK_S = 0.5


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


def drafting_at(target: Source, draft: Source | None, group: RankGroup) -> Callable[[], None]:
    """What drafts for rank 0 until it closes the target, to be called on a thread of its own.

    Args: as for `runtime.follow`.
    """
    for source in (target, draft):
        if isinstance(source, tuple):
            mx.eval(source[0])  # on the caller's thread, which may have made lazy arrays

    def draft_until_closed() -> None:
        link = _RankEnd(group)
        while not isinstance(message := group.receive()[1], CloseTarget):
            if not isinstance(message, DrafterFrame):
                raise RankError(f"rank {group.rank} drafts, and rank 0 sent {type(message).__name__}")
            if message.data:
                link.first = message
                trio.run(draft_for, link, lambda _: (target, draft))
                if link.is_target_closed:
                    return

    return draft_until_closed


class _RankEnd:
    """The end of a link at the rank that drafts; see `Link`.

    Attributes:
        first: a message that has been received.
        is_target_closed: whether rank 0 has closed the target.
    """

    name = "rank 0"
    is_behind = False

    def __init__(self, group: RankGroup) -> None:
        self.first: DrafterFrame | None = None
        self.is_target_closed = False
        self._group = group

    def send(self, data: bytes) -> None:
        # This waits if rank 0 takes nothing. Then there is nothing else to do here.
        with suppress(RankError):  # of which `receive` tells, too
            for frame in frames(data):
                self._group.send(frame)

    async def receive(self) -> bytes:
        parts: list[bytes] = []
        while True:
            first, self.first = self.first, None
            frame = first or await trio.to_thread.run_sync(self._receive)
            if frame is not None and frame.data:
                parts.append(frame.data)
                if frame.is_last:
                    return b"".join(parts)
            elif frame is not None:
                raise LinkLostError("rank 0 has closed the drafter")
            else:
                await trio.lowlevel.checkpoint()

    def _receive(self) -> DrafterFrame | None:
        """The next message; None if there is none for a while.

        Raises:
            LinkLostError: the target was closed.
            RankError: the group is broken, or this is no message to a drafter.
        """
        try:
            message = self._group.receive(_LOOK_S)[1]
        except TimeoutError:
            return None
        if isinstance(message, CloseTarget):
            self.is_target_closed = True
            raise LinkLostError("rank 0 has closed the target")
        if not isinstance(message, DrafterFrame):
            raise RankError(f"rank {self._group.rank} drafts, and rank 0 sent {type(message).__name__}")
        return message

    async def run(self) -> None:
        await trio.sleep_forever()

    def close(self) -> None:
        """Rank 0 closes the link."""
