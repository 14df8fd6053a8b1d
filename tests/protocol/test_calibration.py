"""Calibrated confidence approaches the drafter's acceptance rate, whatever its own confidence is or becomes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.calibration import Calibration
from protocol.lookahead_tree import Guess

TRUTH: dict[str, Callable[[float], float]] = {
    "says what it knows": lambda raw: raw,
    "overstates it": lambda raw: 0.5 * raw,
    "is far too sure": lambda raw: raw**4,
    "understates it": lambda raw: 1 - (1 - raw) ** 3,
    "says nothing": lambda raw: 0.6,
}


def taught(
    calibration: Calibration,
    truth: Callable[[float], float],
    num: int,
    seed: int = 0,
    copy_kind: int | None = None,
) -> None:
    dice = random.Random(seed)
    for _ in range(num):
        raw = dice.betavariate(1.2, 0.8)
        calibration.observe(Guess(1, raw, raw=raw, copy_kind=copy_kind), dice.random() < truth(raw))


@sweep("what", TRUTH)
def test_a_drafters_confidence_becomes_how_often_it_is_right(what):
    calibration, truth = Calibration(), TRUTH[what]
    taught(calibration, truth, 2000)
    raws = [0.1, 0.3, 0.5, 0.7, 0.9]
    errors = [calibration(None, raw) - truth(raw) for raw in raws]
    assert max(map(abs, errors)) < 0.25
    assert sum(map(abs, errors)) / len(errors) < 0.12


@pytest.mark.parametrize("what", ["overstates it", "is far too sure", "understates it"])
def test_a_few_dozen_observations_are_worth_more_than_its_word(what):
    calibration, truth = Calibration(), TRUTH[what]
    taught(calibration, truth, 60)
    raws = [0.2, 0.4, 0.6, 0.8]
    learnt = sum(abs(calibration(None, raw) - truth(raw)) for raw in raws)
    assert learnt < sum(abs(raw - truth(raw)) for raw in raws)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9)])
def test_a_change_is_followed_within_a_few_dozen_observations(before, after):
    calibration = Calibration()
    taught(calibration, lambda raw: before, 500)
    taught(calibration, lambda raw: after, 50, seed=1)
    assert abs(calibration.mean_acceptance - after) < 0.35 * abs(after - before)


def test_drafts_and_kinds_of_copies_are_told_apart():
    calibration = Calibration()
    taught(calibration, lambda raw: 0.95, 200)
    taught(calibration, lambda raw: 0.05, 200, copy_kind=1)
    assert calibration(None, 0.5) > 0.8
    assert calibration(1, 0.5) < 0.2
    assert calibration(2, 0.5) == pytest.approx(0.5, abs=0.02)
    # Copies say nothing about how often the drafter's choice is right.
    assert calibration.mean_acceptance > 0.9


observations = st.lists(
    st.tuples(
        st.sampled_from(["guess", "expect", "begin"]), st.none() | st.integers(0, 3), st.floats(0, 1), st.booleans()
    ),
    max_size=60,
)


@given(seen=observations, raw=st.floats(0, 1), copy_kind=st.none() | st.integers(0, 4))
@settings(max_examples=100)
def test_whatever_was_seen_nothing_is_certain(seen, raw, copy_kind):
    calibration = Calibration()
    for kind, its_copy_kind, its_raw, was_right in seen:
        match kind:
            case "guess":
                calibration.observe(Guess(1, its_raw, raw=its_raw, copy_kind=its_copy_kind), was_right)
            case "expect":
                calibration.observe_unjudged(its_raw)
            case "begin":
                calibration.begin_text()
        assert 0 <= calibration.mean_acceptance <= 1
    assert 0 < calibration(copy_kind, raw) < 1


@pytest.mark.parametrize("was_right", [True, False])
def test_a_thousand_surprises_in_a_row_leave_it_finite_and_able_to_learn(was_right):
    calibration = Calibration()
    for _ in range(1000):
        calibration.observe(Guess(1, 0.5, raw=1.0 - was_right), was_right)
    assert math.isfinite(calibration(None, 0.5))
    for _ in range(60):
        calibration.observe(Guess(1, 0.5, raw=1.0 - was_right), not was_right)
    assert (calibration(None, 1.0 - was_right) > 0.5) is not was_right


def test_with_another_text_there_is_hope_again():
    calibration = Calibration()
    taught(calibration, lambda raw: 0.0, 200)
    assert calibration.mean_acceptance < 0.1
    low = calibration.mean_acceptance
    calibration.begin_text()
    assert calibration.mean_acceptance > low + 0.1
    # A few observations outweigh the prior.
    taught(calibration, lambda raw: 0.0, 30)
    assert calibration.mean_acceptance < 0.15


def test_hope_is_no_better_than_what_is_known_of_a_good_drafter():
    calibration = Calibration()
    taught(calibration, lambda raw: 1.0, 200)
    calibration.begin_text()
    assert 0.8 < calibration.mean_acceptance <= 1.0


def test_a_choice_of_which_nothing_is_known_counts_as_what_is_expected_of_it():
    calibration = Calibration()
    for _ in range(200):
        calibration.observe_unjudged(0.3)
    assert calibration.mean_acceptance == pytest.approx(calibration(None, 0.3), abs=0.02)
