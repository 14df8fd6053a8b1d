"""What a drafter does next, by enumeration of all that may be known of a session, and over schedules of sessions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import attrs
import pytest
from sweeps import sweep

from protocol.draft_plan import (
    MAX_BEHIND_WHEN_READY,
    MAX_UNREAD,
    DraftPhase,
    Facts,
    Notice,
    Standing,
    Task,
    Waiting,
    next_job,
    next_step,
    phase_of,
)
from protocol.session_state import SessionPhase

# --- one session ----------------------------------------------------------------------------------

# All steps that a phase may have.
STEPS: dict[DraftPhase, set[Task | Notice | None]] = {
    DraftPhase.OPENING: {Task.OPEN, Notice.REST},
    DraftPhase.READING: {
        Task.READ_PROMPT,
        Task.READ,
        Notice.ANNOUNCE,
        Notice.REST_WITHOUT_FEATURES,
        None,
    },
    DraftPhase.READY: {Task.DRAFT, Task.READ},
    DraftPhase.VERIFYING: {Task.DRAFT, Task.READ},
    DraftPhase.RESTING: {None, Task.OPEN, Task.READ, Task.CATCH_UP},
    DraftPhase.LEAVING: {None, Notice.LEAVE},
    DraftPhase.LEFT: {Task.CLOSE},
}
OVER = (SessionPhase.UNDRAFTED, SessionPhase.CLOSED)
FLAGS = [field.name for field in attrs.fields(Facts) if field.name not in ("turn", "standing", "num_behind")]
NUM_BEHIND = (1, MAX_BEHIND_WHEN_READY, MAX_BEHIND_WHEN_READY + 1, MAX_UNREAD, MAX_UNREAD + 1)


def every_situation() -> Iterator[Facts]:
    for turn, standing, num_behind in itertools.product(SessionPhase, Standing, NUM_BEHIND):
        for values in itertools.product((False, True), repeat=len(FLAGS)):
            yield Facts(turn, standing, num_behind=num_behind, **dict(zip(FLAGS, values, strict=True)))


def test_each_phase_has_its_steps_and_every_one_of_them() -> None:
    found: dict[DraftPhase, set[Task | Notice | None]] = {phase: set() for phase in DraftPhase}
    for facts in every_situation():
        found[phase_of(facts)].add(next_step(facts))
    assert found == STEPS


def test_what_holds_in_every_situation() -> None:
    for facts in every_situation():
        step = next_step(facts)
        assert (step is Task.CLOSE) == (facts.turn in OVER)
        if facts.is_leaving and facts.turn not in OVER:
            assert step is None
        if step is Task.DRAFT:
            # A step drafts for a target that waits for it or verifies, from a cache that lacks little.
            assert facts.is_open
            assert facts.is_ready
            assert not facts.is_idle
            assert facts.has_read_prompt
            assert not facts.has_lost_tokens
            assert facts.num_behind <= MAX_UNREAD
        if step is Notice.ANNOUNCE:
            assert facts.is_open
            assert facts.has_read_prompt
            assert not facts.is_ready
            assert facts.num_behind <= MAX_BEHIND_WHEN_READY
        if step in (Task.READ, Task.READ_PROMPT, Task.CATCH_UP):
            assert facts.is_open
        if step is Task.OPEN:
            assert not facts.is_open
        if isinstance(step, Notice) and step is not Notice.LEAVE:
            assert not facts.is_ready


def after(facts: Facts, step: Task | Notice) -> Facts:
    """What is known once a step is done, if nothing else happens."""
    match step:
        case Notice.LEAVE:
            return attrs.evolve(facts, is_leaving=True)
        case Notice.REST | Notice.REST_WITHOUT_FEATURES:
            return attrs.evolve(facts, standing=Standing.READY, turn=SessionPhase.RESTING, is_idle=True)
        case Notice.ANNOUNCE:
            return attrs.evolve(facts, standing=Standing.READY)
        case Task.OPEN:
            return attrs.evolve(facts, is_open=True)
        case Task.READ_PROMPT:
            return attrs.evolve(facts, has_read_prompt=True)
        case Task.READ:
            num_behind = facts.num_behind // 2
            lost = facts.has_lost_tokens and num_behind > MAX_BEHIND_WHEN_READY
            return attrs.evolve(facts, num_behind=num_behind, has_lost_tokens=lost)
        case Task.CATCH_UP:
            return attrs.evolve(facts, num_behind=0, catches_up=False)
        case _:
            raise AssertionError(step)


def test_from_every_situation_the_drafter_comes_to_draft_to_wait_or_to_leave() -> None:
    for begun in every_situation():
        facts, num_steps = begun, 0
        while (step := next_step(facts)) not in (None, Task.DRAFT, Task.CLOSE):
            assert step is not None
            facts, num_steps = after(facts, step), num_steps + 1
            assert num_steps < 15, begun
        if step is None and not facts.is_leaving:
            assert facts.awaits_features or facts.is_idle


# --- all sessions ---------------------------------------------------------------------------------

CHUNK = 8


def every_queue(size: int) -> list[tuple[Waiting, ...]]:
    """Queues of all needs, in all orders, in which steps have waited for no tokens, and for a chunk."""
    kinds = [Waiting(task, 0) for task in (Task.OPEN, Task.CLOSE, Task.READ)]
    kinds += [Waiting(Task.DRAFT, 0, num_read, alone) for num_read in (0, CHUNK) for alone in (False, True)]
    return [
        tuple(Waiting(each.task, since, each.num_read, each.alone) for each, since in zip(found, order, strict=True))
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
            assert all(each.task is Task.DRAFT and not each.alone for each in chosen)
        if chosen[0].task is Task.DRAFT and not chosen[0].alone:
            # Nobody who could take part is left out, but for want of room, and then the last that came.
            able = sorted(each.since for each in queue if each.task is Task.DRAFT and not each.alone)
            assert [each.since for each in chosen] == able[:most]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_comes_first(size: int) -> None:
    for queue in every_queue(size):
        first = queue[next_job(queue, 3, CHUNK)[0]]
        if any(each.task in (Task.OPEN, Task.CLOSE) for each in queue):
            assert first.task in (Task.OPEN, Task.CLOSE)
        elif any(each.task is Task.DRAFT and each.num_read >= CHUNK for each in queue):
            assert first.task is Task.DRAFT
        else:
            assert first.since == 0 or first.task is Task.DRAFT


@sweep("seed", range(20))
def test_no_text_waits_for_long(seed: int) -> None:
    """A text worth a step waits for less than two chunks, and a chunk for a step of all and a chunk of each other."""
    dice = random.Random(seed)
    num_texts, num_jobs, num_read = 6, 0, 0
    waiting: dict[int, tuple[Task, int, int]] = {}  # (task, jobs before, tokens before)
    waited: dict[int, int] = {}
    for _ in range(500):
        for text in range(num_texts):
            if text not in waiting and dice.random() < 0.5:
                waiting[text] = (dice.choice([Task.READ, Task.DRAFT, Task.DRAFT]), num_jobs, num_read)
        texts = list(waiting)
        queue = [Waiting(task, since, num_read - before) for task, since, before in waiting.values()]
        chosen = {texts[index] for index in next_job(queue, num_texts, CHUNK)}
        if not chosen:
            continue
        num_jobs += 1
        if waiting[min(chosen)][0] is Task.READ:
            num_read += dice.randint(1, CHUNK)
        for text in chosen:
            del waiting[text]
            waited.pop(text, None)
        for text, (task, _, before) in waiting.items():
            waited[text] = waited.get(text, 0) + 1
            assert waited[text] <= 2 * num_texts
            assert task is Task.READ or num_read - before < 2 * CHUNK
