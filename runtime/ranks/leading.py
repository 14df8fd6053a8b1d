"""Leading: what rank 0 does about the other ranks while a runtime is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from actors.distributed.rank_group import RankGroup
from actors.workers.thread_worker import ThreadWorker
from protocol.errors import OutriderError, RankError, SettingsError
from protocol.rank_messages import CloseTarget
from protocol.reprs import shown
from protocol.trace import Event
from runtime.loading.model_sources import Source
from runtime.ranks.sharded_target import check_drafter, check_sharded

# Ranks that are out of step in spite of all checks wait for each other without end, and all send heartbeats. So a job
# of the target counts as hanging after so many seconds, beside four times what it should take.
PASS_TIMEOUT_S = 60.0


def check_group(group: Any, target: Source, draft: Source | None) -> None:
    """Check the option `group` of `open`, and what does not go with it.

    Raises:
        SettingsError: it is no group of ranks, this is not rank 0, another runtime leads the group, or another option
            does not go with ranks.
        RankError: the group is broken.
    """
    if not isinstance(group, RankGroup):
        raise SettingsError(f"group must be what runtime.join_ranks() returns, or None, got {shown(group)}")
    if group.rank != 0:
        raise SettingsError(f"this is rank {group.rank}, and rank 0 opens the runtime; call runtime.follow() here")
    _check_free(group)
    check_sharded(target)
    check_drafter(draft, target)
    group.check()


def _check_free(group: RankGroup) -> None:
    if group.is_led:
        raise SettingsError("another runtime is open in this group of ranks, which has one at a time; close it first")


def target_worker(group: RankGroup, on_event: Callable[[Event], None]) -> ThreadWorker:
    """The worker of a sharded target: its thread can be abandoned, and its errors name the rank that caused them."""
    return ThreadWorker("target", on_event, may_be_given_up=True, hang_timeout_s=PASS_TIMEOUT_S, explain=group.explain)


@contextmanager
def leading(group: RankGroup, worker: ThreadWorker) -> Iterator[None]:
    """While in force, the worker ends as soon as the group is broken; afterwards the other ranks release their parts.

    A collective whose peers are gone may wait for ever, so the thread is not waited for.

    Raises: SettingsError: another runtime leads the group.
    """
    _check_free(group)
    group.is_led = True
    try:
        with ending_all(group, worker.give_up), group.watching(lambda: worker.is_hanging):
            try:
                yield
            finally:
                if group.error is None:
                    group.send(CloseTarget())
    finally:
        group.is_led = False


@contextmanager
def ending_all(group: RankGroup, end: Callable[[OutriderError], None]) -> Iterator[None]:
    """While in force, have trio call a function with the error once the group is broken."""
    token = trio.lowlevel.current_trio_token()

    def call(error: RankError) -> None:
        try:
            token.run_sync_soon(end, error)
        except trio.RunFinishedError:
            return  # nothing is left to end

    with group.on_error(call):
        yield
