"""Which texts take part in the drafter's next job."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs


class Need(enum.IntEnum):
    """What the drafter has to do for a text.

    OPEN and CLOSE concern its cache and take next to no time; READ takes as long as a chunk of the text, or less; DRAFT
    is a draft step, the only job that texts share.
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
        since: how many jobs had begun when its wait began, not counting those that open and close caches.
        num_read: tokens that were read for other texts since then.
        alone: whether no other text may share its draft step.
    """

    need: Need
    since: int
    num_read: int = 0
    alone: bool = False


def next_job(waiting: Sequence[Waiting], most: int, chunk_tokens: int) -> tuple[int, ...]:
    """The texts of the next job, the one that has waited longest first; empty if there is nothing to do.

    Caches are opened and closed first. A text that needs a step waits for the running job and one chunk at most, unless
    there are more texts than fit into a step. Short prompts are read before it, so that their texts share the step.

    Args:
        waiting: all that wait.
        most: most texts in one draft step, >= 1.
        chunk_tokens: tokens that may be read while a draft step waits, >= 1.
    """
    order = sorted(range(len(waiting)), key=lambda index: (waiting[index].since, waiting[index].need))
    brief = [index for index in order if waiting[index].need in (Need.OPEN, Need.CLOSE)]
    drafting = [index for index in order if waiting[index].need is Need.DRAFT]
    overdue = [index for index in drafting if waiting[index].num_read >= chunk_tokens]
    for first in (*brief, *overdue, *order):
        if first not in drafting or waiting[first].alone:
            return (first,)
        return tuple([index for index in drafting if not waiting[index].alone][:most])
    return ()
