"""The plan of the next pass: never worse than any other choice of width, and nobody is passed over."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.pass_plan import (
    MAX_WAIT,
    Expected,
    PassPlan,
    ReadyRound,
    TargetView,
    Turn,
    next_pass,
    plan_pass,
)
from protocol.prices import Prices

deterministic = settings(max_examples=120)


def line(slope: float) -> Callable[[int], float]:
    return lambda rows: 1.0 + slope * (rows - 1)


def plateau(rows: int) -> float:
    """Eight rows cost what one costs, the ninth as much again."""
    return float(1 + (rows - 1) // 8)


def rate(rounds: list[ReadyRound], plan: PassPlan, seconds: Callable[[int], float], num_others: int = 0) -> float:
    expected = sum(1.0 + sum(rounds[index].reach[:num]) for index, num in plan.num_drafted.items())
    return expected / (plan.wait_s + seconds(num_computed(rounds, plan, num_others) * plan.width))


def num_computed(rounds: list[ReadyRound], plan: PassPlan, num_others: int = 0) -> int:
    """Rows of the batch are computed in any case."""
    return num_others + len({*plan.num_drafted, *(i for i, each in enumerate(rounds) if each.is_row)})


rounds_of = st.lists(
    st.builds(
        ReadyRound,
        st.integers(1, 3),
        st.lists(st.floats(0, 1), max_size=3).map(lambda reach: tuple(sorted(reach, reverse=True))),
        st.booleans(),
        is_row=st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@deterministic
@given(rounds_of, st.sampled_from([0.0, 0.05, 0.3, 1.0]), st.integers(1, 6), st.integers(0, 2))
def test_no_other_choice_of_rounds_and_drafts_is_better(
    rounds: list[ReadyRound], slope: float, max_batch: int, num_others: int
) -> None:
    plan = plan_pass(rounds, line(slope), max_batch, num_other_rows=num_others)
    required = {i for i, each in enumerate(rounds) if i == 0 or each.was_passed_over}
    required = set(sorted(required)[:max_batch])
    best = 0.0
    for width in range(1, max(each.max_width for each in rounds) + 1):
        fitting = [i for i, each in enumerate(rounds) if each.num_needed <= width]
        for size in range(1, max_batch + 1):
            for members in itertools.combinations(fitting, size):
                if required <= set(members):
                    for drafted in itertools.product(*(range(rounds[i].num_drafted(width) + 1) for i in members)):
                        other = PassPlan(dict(zip(members, drafted, strict=True)), width)
                        best = max(best, rate(rounds, other, line(slope), num_others))
    assert rate(rounds, plan, line(slope), num_others) == pytest.approx(best)


@deterministic
@given(rounds_of, st.integers(1, 6))
def test_the_first_round_takes_part_and_everybody_feeds_what_it_needs(rounds: list[ReadyRound], max_batch: int) -> None:
    plan = plan_pass(rounds, plateau, max_batch)
    assert 0 in plan.num_drafted
    passed_over = [i for i, each in enumerate(rounds) if i > 0 and each.was_passed_over]
    assert set(passed_over[: max_batch - 1]) <= plan.num_drafted.keys()
    assert len(plan.num_drafted) <= max_batch
    for index, num_drafted in plan.num_drafted.items():
        assert 0 <= num_drafted <= len(rounds[index].reach)
        assert rounds[index].num_needed + num_drafted <= plan.width


def test_a_plateau_is_filled_and_a_step_is_not_climbed_for_little() -> None:
    sure, unsure = ReadyRound(1, (0.9,) * 9), ReadyRound(1, (0.3, 0.1))
    assert plan_pass([sure], plateau, 8).num_drafted == {0: 7}
    # Four rows at two tokens each are the plateau.
    assert plan_pass([sure, sure, unsure, unsure], plateau, 8) == PassPlan({0: 3, 1: 3}, 4)
    assert plan_pass([unsure, unsure, sure, sure], plateau, 8).num_drafted[0] <= 1
    assert plan_pass([unsure] * 8, plateau, 8).num_drafted == dict.fromkeys(range(8), 0)


# --- waiting for rounds that come -----------------------------------------------------------------


def test_a_pass_waits_briefly_to_spare_another_pass() -> None:
    soon, late = ReadyRound(1, due_s=0.2), ReadyRound(1, due_s=0.9)
    # Where width is free, two texts in 1.2 s are better than one in 1 s.
    assert plan_pass([ReadyRound(1), soon], line(0.0), 8, max_wait_s=1.0) == PassPlan({0: 0, 1: 0}, 1, 0.2)
    assert plan_pass([ReadyRound(1), soon], line(0.0), 8, max_wait_s=0.1).num_drafted == {0: 0}
    # Where two rows take twice as long, a wait is lost.
    assert plan_pass([ReadyRound(1), soon], line(1.0), 8, max_wait_s=1.0).num_drafted == {0: 0}
    assert plan_pass([ReadyRound(1)] * 3 + [late], line(0.0), 8, max_wait_s=1.0).wait_s == 0.0
    assert plan_pass([ReadyRound(1)] * 3 + [late] * 5, line(0.0), 8, max_wait_s=1.0).wait_s == 0.9


def test_a_round_is_hurried_where_drafts_are_not_worth_the_wait() -> None:
    unsure = ReadyRound(1, (0.1,), due_s=0.5, can_hurry=True)
    assert plan_pass([ReadyRound(1), unsure], line(0.0), 8, max_wait_s=1.0) == PassPlan({0: 0, 1: 0}, 1)
    sure = ReadyRound(1, (1.0, 1.0, 1.0), due_s=0.5, can_hurry=True)
    assert plan_pass([ReadyRound(1), sure], line(0.0), 8, max_wait_s=1.0) == PassPlan({0: 0, 1: 3}, 4, 0.5)
    assert plan_pass([ReadyRound(1), sure], line(0.0), 8, max_wait_s=0.1) == PassPlan({0: 0, 1: 0}, 1)


@deterministic
@given(
    rounds_of,
    st.lists(st.tuples(st.floats(0.01, 3.0), st.booleans(), st.lists(st.floats(0, 1), max_size=3)), max_size=3),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.floats(0, 2),
)
def test_no_plan_waits_too_long_or_gains_less_than_beginning_at_once(
    rounds: list[ReadyRound], coming: list[tuple[float, bool, list[float]]], slope: float, max_wait_s: float
) -> None:
    all_rounds = rounds + [
        ReadyRound(1, tuple(sorted(reach, reverse=True)), due_s=due_s, can_hurry=can_hurry)
        for due_s, can_hurry, reach in coming
    ]
    at_once = plan_pass(rounds, line(slope), 8)
    plan = plan_pass(all_rounds, line(slope), 8, max_wait_s=max_wait_s)
    assert 0.0 <= plan.wait_s <= max_wait_s
    assert 0 in plan.num_drafted
    expected = 0.0
    for index, num_drafted in plan.num_drafted.items():
        each = all_rounds[index].after(plan.wait_s)
        assert num_drafted <= len(each.reach)
        expected += 1.0 + sum(each.reach[:num_drafted])
    rate_with_wait = expected / (plan.wait_s + line(slope)(num_computed(all_rounds, plan) * plan.width))
    assert rate_with_wait >= rate(rounds, at_once, line(slope)) * (1 - 1e-9)


# --- what the target does next --------------------------------------------------------------------

PLAIN, AHEAD = Turn(is_plain=True), Turn(is_plain=True, is_ahead=True)
KEPT, CUTTABLE = Turn(ReadyRound(3), 2), Turn(ReadyRound(1, (0.9, 0.5)), "auto")
TURNS = [PLAIN, AHEAD, KEPT, CUTTABLE, attrs.evolve(KEPT, is_alone=True), attrs.evolve(CUTTABLE, reads_again=True)]
EXPECTED = [
    Expected(awaits_drafter=False, last=ReadyRound(1), due_s=0.2),
    Expected(True, True, 2, KEPT.round, 0.4),
    Expected(True, True, "auto", CUTTABLE.round, 0.1, can_hurry=True),
    Expected(True, True, "auto", CUTTABLE.round, 0.1, can_hurry=True, was_hurried=True),
    Expected(awaits_drafter=True),
]


def priced_by(slope: float) -> Prices:
    """A pass takes 1 s and so much more for each further row, a draft step 0.1 s."""
    prices = Prices()
    for rows in (1, 2, 4, 8, 16) * 8:
        prices.verify.observe(rows, 0.0, 1.0 + slope * (rows - 1))
        prices.draft_alone.observe(rows, 0.0, 0.1)
    return prices


PRICES = [priced_by(0.0), priced_by(0.5)]


def every_view(size: int, *, most_shared: int) -> Iterator[TargetView]:
    for turns in itertools.product(TURNS, repeat=size):
        for expected in itertools.chain.from_iterable(itertools.combinations(EXPECTED, n) for n in range(3)):
            for prices, is_due, has_prompts in itertools.product(PRICES, [False, True], [False, True]):
                yield TargetView(
                    [attrs.evolve(turn, is_due=is_due) for turn in turns],
                    list(expected),
                    prices,
                    has_prompts=has_prompts,
                    most_shared=most_shared,
                    max_batch=min(most_shared, 2),
                    hurried_until_s=0.05,
                )


@sweep(("most_shared", "size"), [(1, 2), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_every_pass_is_over_texts_that_can_share_it_and_none_is_empty(size: int, most_shared: int) -> None:
    for view in every_view(size, most_shared=most_shared):
        job = next_pass(view)
        texts = [view.turns[index] for index in job.num_drafted]
        assert bool(texts) is (job.kind not in ("prompts", "wait"))
        assert len(texts) <= view.max_batch or all(turn.is_ahead for turn in texts)
        assert view.has_prompts or job.kind != "prompts"
        match job.kind:
            case "plain":
                assert all(turn.is_plain for turn in texts)
            case "again":
                assert [turn.reads_again for turn in texts] == [True]
            case "verify":
                assert not any(turn.reads_again for turn in texts)
                assert len(texts) == 1 or not any(turn.is_alone for turn in texts)
                # Before a text takes part in it, what was launched for the text is over.
                assert not any(turn.is_ahead for turn in texts)
        for index, number in job.num_drafted.items():
            assert 0 <= number <= len(view.turns[index].round.reach)


@sweep("size", [0, 1, 2])
def test_a_wait_is_bounded_beside_a_ready_text_and_none_beside_a_prompt(size: int) -> None:
    num_waits = 0
    for view in every_view(size, most_shared=4):
        job = next_pass(view)
        assert (job.wait_s > 0.0) is (job.kind == "wait")
        assert job.kind == "wait" or not job.hurried
        # A fixed lookahead is what the user wants, however long it takes.
        assert all(view.expected[index].can_hurry for index in job.hurried)
        if job.kind == "wait":
            num_waits += 1
            assert not view.has_prompts
            assert bool(view.turns) is (job.wait_s < math.inf)
            # However often it is asked again, and whatever is expected then.
            later = attrs.evolve(view, now_s=2.0 * MAX_WAIT, expected=[each for each in view.expected if each.last])
            asked = [
                each if each.can_hurry is False else attrs.evolve(each, was_hurried=True) for each in later.expected
            ]
            if view.turns:
                assert next_pass(attrs.evolve(later, expected=asked)).kind != "wait"
    assert num_waits > 0


@sweep("seed", range(20))
def test_no_text_waits_for_more_than_a_pass_and_a_chunk(seed: int) -> None:
    dice, prices = random.Random(seed), PRICES[seed % 2]
    ready: dict[int, Turn] = {}
    waited: dict[int, list[str]] = {}
    num_chunks = 0
    for _ in range(400):
        for text in range(6):
            if text not in ready and dice.random() < 0.4:
                ready[text], waited[text] = dice.choice([PLAIN, KEPT, CUTTABLE]), []
        view = TargetView(
            list(ready.values()),
            [Expected(awaits_drafter=True)] * dice.randint(0, 1),
            prices,
            has_prompts=dice.random() < 0.7,
            most_shared=8,
            max_batch=8,
        )
        job, texts = next_pass(view), list(ready)
        chosen = {texts[index] for index in job.num_drafted}
        for text in chosen:
            del ready[text], waited[text]
        for text, turn in ready.items():
            if job.kind == "prompts":
                ready[text] = attrs.evolve(turn, is_due=True)
            elif chosen:
                ready[text] = attrs.evolve(turn, round=attrs.evolve(turn.round, was_passed_over=True))
            waited[text].append(job.kind)
            assert waited[text].count("prompts") <= 1
            assert len(waited[text]) - waited[text].count("prompts") <= 1
        num_chunks += job.kind == "prompts"
    assert num_chunks > 50
