"""Contests: the order of runs, and what counts of those that were interrupted or failed."""

from __future__ import annotations

import itertools

import pytest

from runtime.measuring.contest import Contest, running_order, time_left

EVERYONE = ("a", "b", "c", "d")


def test_every_turn_has_everyone_once_begins_elsewhere_and_every_other_goes_backwards() -> None:
    turns = [running_order(EVERYONE, turn) for turn in range(2 * len(EVERYONE))]
    for turn in turns:
        assert sorted(turn) == [*EVERYONE]
    assert {turn[0] for turn in turns} == {*EVERYONE}
    # No contender always follows the same one.
    neighbours = {pair for turn in turns[:2] for pair in itertools.pairwise(turn)}
    assert any((b, a) in neighbours for a, b in neighbours)


def played(contest: Contest[str, int, float], until: int | None = None) -> list[tuple[int | None, int, str]]:
    """Run the first steps, or all. Returns: (repeat, case, contender) of each."""
    steps = list(itertools.islice(contest.steps(), until))
    for step in steps:
        contest.record(step, 1.0)
    return [(step.repeat, step.case, step.contender) for step in steps]


def test_everyone_warms_up_and_then_runs_every_case_in_every_repeat() -> None:
    contest: Contest[str, int, float] = Contest(("a", "b"), (1, 2), repeats=2, warm_up=(2,))
    steps = played(contest)
    assert steps[:2] == [(None, 2, "a"), (None, 2, "b")]
    assert sorted(steps[2:]) == sorted(itertools.product(range(2), (1, 2), ("a", "b")))  # type: ignore[type-var]
    assert (contest.is_complete, contest.repeats_done) == (True, 2)
    assert [key for key in contest.runs("a") if key[1] == 2] == [(0, 2), (1, 2)]


def test_a_turn_that_was_cut_short_counts_for_nobody() -> None:
    contest: Contest[str, int, float] = Contest(("a", "b"), (1, 2), repeats=2)
    played(contest, until=7)
    assert (contest.is_complete, contest.repeats_done) == (False, 2)
    assert [len(contest.runs(each)) for each in ("a", "b")] == [3, 3]
    contest.turns[1, 1].clear()
    assert contest.repeats_done == 1


def test_nothing_that_was_run_is_nothing_complete() -> None:
    contest: Contest[str, int, float] = Contest(("a", "b"), (1,))
    assert (contest.is_complete, contest.repeats_done, contest.runs("a")) == (False, 0, {})


def test_who_cannot_run_holds_up_nobody() -> None:
    contest: Contest[str, int, float] = Contest(("a", "b"), (1, 2), warm_up=(1,))
    begun = []
    for step in contest.steps():
        begun.append((step.contender, step.case))
        if step.contender == "b":
            contest.fail(step, "no cache")
        else:
            contest.record(step, 1.0)
    assert begun == [("a", 1), ("b", 1), ("a", 1), ("a", 2)]
    assert (contest.is_complete, contest.failures, contest.runs("b")) == (True, {"b": "no cache"}, {})


def test_who_takes_no_part_in_a_case_is_not_waited_for() -> None:
    contest: Contest[str, int, float] = Contest(
        ("a", "b"), (1, 2), takes_part=lambda who, case: (who, case) != ("b", 2)
    )
    assert sorted(played(contest)) == [(0, 1, "a"), (0, 1, "b"), (0, 2, "a")]  # type: ignore[type-var]
    assert contest.is_complete


@pytest.mark.parametrize(
    ("seconds", "done", "said"), [(3.0, 0.0, ""), (10.0, 1.0, ", about 30 s left"), (60.0, 1.0, ", about 3 min left")]
)
def test_the_time_that_is_left_follows_from_what_is_done(seconds: float, done: float, said: str) -> None:
    assert time_left(seconds, done, 4.0) == said
