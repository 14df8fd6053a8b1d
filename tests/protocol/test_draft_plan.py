"""The drafter's next job, by enumeration, and over schedules of texts that come, are read, drafted for and leave."""

from __future__ import annotations

import itertools
import random

import pytest
from sweeps import sweep

from protocol.draft_plan import Need, Waiting, next_job

CHUNK = 8


def every_queue(size: int) -> list[tuple[Waiting, ...]]:
    """Queues of all needs, in all orders, in which steps have waited for no tokens, and for a chunk."""
    kinds = [Waiting(need, 0) for need in (Need.OPEN, Need.CLOSE, Need.READ)]
    kinds += [Waiting(Need.DRAFT, 0, num_read, alone) for num_read in (0, CHUNK) for alone in (False, True)]
    return [
        tuple(Waiting(each.need, since, each.num_read, each.alone) for each, since in zip(found, order, strict=True))
        for found in itertools.product(kinds, repeat=size)
        for order in itertools.permutations(range(size))
    ]


def test_nothing_is_done_where_nothing_waits() -> None:
    assert next_job([], 4, CHUNK) == ()


@sweep("most", [1, 2, 3])
@sweep("size", [1, 2, 3])
def test_a_job_is_of_one_kind_and_steps_alone_are_shared(size: int, most: int) -> None:
    for queue in every_queue(size):
        chosen = [queue[index] for index in next_job(queue, most, CHUNK)]
        assert chosen
        assert [each.since for each in chosen] == sorted({each.since for each in chosen})
        if len(chosen) > 1:
            assert len(chosen) <= most
            assert all(each.need is Need.DRAFT and not each.alone for each in chosen)
        if chosen[0].need is Need.DRAFT and not chosen[0].alone:
            # Nobody who could take part is left out, but for want of room, and then the last that came.
            able = sorted(each.since for each in queue if each.need is Need.DRAFT and not each.alone)
            assert [each.since for each in chosen] == able[:most]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_comes_first(size: int) -> None:
    for queue in every_queue(size):
        first = queue[next_job(queue, 3, CHUNK)[0]]
        if any(each.need in (Need.OPEN, Need.CLOSE) for each in queue):
            assert first.need in (Need.OPEN, Need.CLOSE)
        elif any(each.need is Need.DRAFT and each.num_read >= CHUNK for each in queue):
            assert first.need is Need.DRAFT
        else:
            assert first.since == 0 or first.need is Need.DRAFT


@sweep("seed", range(20))
def test_no_text_waits_for_long(seed: int) -> None:
    """A text worth a step waits for less than two chunks, and a chunk for a step of all and a chunk of each other."""
    dice = random.Random(seed)
    num_texts, num_jobs, num_read = 6, 0, 0
    waiting: dict[int, tuple[Need, int, int]] = {}  # (need, jobs before, tokens before)
    waited: dict[int, int] = {}
    for _ in range(500):
        for text in range(num_texts):
            if text not in waiting and dice.random() < 0.5:
                waiting[text] = (dice.choice([Need.READ, Need.DRAFT, Need.DRAFT]), num_jobs, num_read)
        texts = list(waiting)
        queue = [Waiting(need, since, num_read - before) for need, since, before in waiting.values()]
        chosen = {texts[index] for index in next_job(queue, num_texts, CHUNK)}
        if not chosen:
            continue
        num_jobs += 1
        if waiting[min(chosen)][0] is Need.READ:
            num_read += dice.randint(1, CHUNK)
        for text in chosen:
            del waiting[text]
            waited.pop(text, None)
        for text, (need, _, before) in waiting.items():
            waited[text] = waited.get(text, 0) + 1
            assert waited[text] <= 2 * num_texts
            assert need is Need.READ or num_read - before < 2 * CHUNK
