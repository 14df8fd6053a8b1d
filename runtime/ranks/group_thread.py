"""Work that waits for other ranks, on a thread that is left behind where the wait would have no end."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import outcome

from actors.distributed.rank_group import RankGroup
from actors.workers.thread_pool import run_on_thread
from protocol.errors import RankError

# How long a thread may take to notice that the group is broken, in seconds. A collective that hangs never does.
GRACE_S = 1.0

T = TypeVar("T")


def run_in_group(name: str, work: Callable[[], T], group: RankGroup, timeout_s: float | None = None) -> T:
    """Do a piece of work on a thread, and wait for it until it ends or the group is broken.

    Args:
        work: the work. It breaks the group where it fails; see `breaking`.
        timeout_s: longest time that it may take; None for ever.

    Returns: what the work returns.

    Raises:
        RankError: the group is broken, or the time is up, which breaks it. A thread may be stuck in a collective.
        Whatever the work raises.
    """
    results: list[T] = []
    ended: queue.SimpleQueue[outcome.Outcome[None] | None] = queue.SimpleQueue()
    thread = run_on_thread(name, lambda: results.append(work()), ended.put)
    with group.on_error(lambda _: ended.put(None)):
        try:
            result = ended.get(timeout=timeout_s) or ended.get(timeout=GRACE_S)
        except queue.Empty:
            thread.abandon()
            raise group.fail(f"rank {group.rank} has not ended in time: the ranks wait for each other") from None
        except KeyboardInterrupt:
            thread.abandon()
            group.fail(f"rank {group.rank} was interrupted")
            raise
    if result is not None:
        result.unwrap()
    return results[0]


@contextmanager
def breaking(group: RankGroup, doing: Callable[[], str]) -> Iterator[None]:
    """Break the group with whatever is raised inside: this rank is out of step then.

    Args:
        doing: says what this rank was doing.

    Raises: RankError: why the group is broken.
    """
    try:
        yield
    except RankError as error:
        raise group.fail(str(error)) from error
    # Whatever a model's code, or MLX, raises.
    except Exception as error:
        if isinstance(explained := group.explain(error, is_out_of_step=True), RankError):
            raise explained from error
        raise group.fail(f"rank {group.rank} failed in {doing()}: {type(error).__name__}: {error}") from error
