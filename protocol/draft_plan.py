"""Which texts have a part in the drafter's next job."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs


class Need(enum.IntEnum):
    """What the drafter has to do for a text.

    OPEN and CLOSE concern its cache and take next to no time; READ is a chunk of the text, or what else takes as long
    at most; DRAFT is a draft step, the only job that texts share.
    """

    OPEN = 0
    CLOSE = 1
    READ = 2
    DRAFT = 3


@attrs.frozen
class Waiting:
    """A text that waits for the drafter.

    Attributes:
        need: what for.
        since: the number of jobs that had begun by then.
        alone: whether no other text may share its draft step.
    """

    need: Need
    since: int
    alone: bool = False


def next_job(waiting: Sequence[Waiting], most: int, *, last_read: int) -> tuple[int, ...]:
    """The texts of the next job, the one that has waited longest first; empty if there is nothing to do.

    Caches are opened and closed first. A text that is worth a step waits for the running job and one chunk at most,
    unless there are more texts than fit into a step.

    Args:
        waiting: all that wait.
        most: most texts in one draft step, >= 1.
        last_read: which of the jobs was the last that read a chunk, from 1; 0 for none.
    """
    order = sorted(range(len(waiting)), key=lambda index: (waiting[index].since, waiting[index].need))
    brief = [index for index in order if waiting[index].need in (Need.OPEN, Need.CLOSE)]
    overdue = [index for index in order if waiting[index].need is Need.DRAFT and waiting[index].since < last_read]
    for first in (*brief, *overdue, *order):
        if waiting[first].need is not Need.DRAFT or waiting[first].alone:
            return (first,)
        drafting = [index for index in order if waiting[index].need is Need.DRAFT and not waiting[index].alone]
        return tuple(drafting[:most])
    return ()
