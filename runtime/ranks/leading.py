"""Leading: what rank 0 does about the other ranks while a runtime is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import trio

from actors.distributed.rank_address import is_ring
from actors.distributed.rank_group import RankGroup
from actors.workers.thread_worker import ThreadWorker
from protocol.errors import OutriderError, RankError, SettingsError
from protocol.rank_messages import CloseTarget
from protocol.reprs import shown
from protocol.settings import AUTO_DRAFT
from protocol.trace import Event
from protocol.validation import check_integer
from runtime.loading.model_sources import ModelSource
from runtime.ranks.sharded_target import check_drafter, check_sharded

# Ranks that are out of step in spite of all checks wait for each other, and still send heartbeats. So a job of the
# target counts as hanging after this many seconds and four times what it should take.
PASS_TIMEOUT_S = 60.0


def check_group(group: Any, target: ModelSource, draft: ModelSource | None, draft_rank: Any = None) -> None:
    """Check the options `group` and `draft_rank` of `open`, and whether the models can be opened with them. Raises:
    SettingsError: they cannot, or this is not rank 0. RankError: the group is broken.
    """
    if group is None and draft_rank is None:
        return
    if group is None:
        raise SettingsError(
            "draft_rank is one of several ranks, and there is no group of them; give group=runtime.join_ranks() in "
            "a process that mlx.launch has started, or leave draft_rank out"
        )
    if not isinstance(group, RankGroup):
        raise SettingsError(f"group must be what runtime.join_ranks() returns, or None, got {shown(group)}")
    if group.rank != 0:
        raise SettingsError(f"this is rank {group.rank}, and rank 0 opens the runtime; call runtime.follow() here")
    _check_free(group)
    if draft_rank is not None:
        check_integer("draft_rank", draft_rank, 0, group.size - 1)
    remote = draft_rank or None  # rank 0 drafts beside its part of the target
    if remote is not None and (draft is None or draft == AUTO_DRAFT):
        raise SettingsError(
            f"draft_rank={remote} is where a draft model is loaded, and none is named; give one as draft, or leave "
            "draft_rank out"
        )
    if is_sharded(group, remote):
        if remote is not None and not is_ring():
            raise SettingsError(
                f"draft_rank={remote} leaves several ranks to the target, and only MLX's ring can connect them "
                'without that one; use the backend "ring", or two ranks'
            )
        group.check_mlx(remote)
        check_sharded(target)
    if remote is None:
        check_drafter(draft, target)
    group.check()


def is_sharded(group: RankGroup, draft_rank: int | None) -> bool:
    """Whether the target of a group is sharded: not if all ranks but rank 0 draft."""
    return len(group.target_ranks(draft_rank or None)) > 1


def _check_free(group: RankGroup) -> None:
    if group.is_led:
        raise SettingsError("another runtime is open in this group of ranks, which has one at a time; close it first")


def worker_for(on_event: Callable[[Event], None], group: RankGroup | None, draft_rank: int | None) -> ThreadWorker:
    """The target's worker; that of a sharded one has a thread that can be abandoned, and errors that name the rank."""
    if group is None or not is_sharded(group, draft_rank):
        return ThreadWorker("target", on_event)
    return ThreadWorker("target", on_event, may_be_given_up=True, hang_timeout_s=PASS_TIMEOUT_S, explain=group.explain)


@contextmanager
def leading(group: RankGroup, worker: ThreadWorker, draft_rank: int | None = None) -> Iterator[None]:
    """While in force, the worker ends as soon as the group is broken; afterwards the other ranks release their parts. A
    collective whose peers are gone may wait for ever, so the thread is not waited for.

    Raises: SettingsError: another runtime leads the group.
    """
    _check_free(group)
    group.is_led, group.is_hanging = True, lambda: worker.is_hanging
    try:
        with group.drafted_by(draft_rank or None), ending_all(group, worker.give_up):
            try:
                yield
            finally:
                if group.error is None:
                    group.send(CloseTarget())
    finally:
        group.is_led, group.is_hanging = False, None


@contextmanager
def ending_all(group: RankGroup, end: Callable[[OutriderError], None]) -> Iterator[None]:
    """While in force, have trio call a function with the error once the group is broken."""
    token = trio.lowlevel.current_trio_token()

    def end_soon(error: RankError) -> None:
        with suppress(trio.RunFinishedError):  # nothing is left to end
            token.run_sync_soon(end, error)

    with group.on_error(end_soon):
        yield
