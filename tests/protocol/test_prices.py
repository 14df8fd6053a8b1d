"""Prices are found from measured passes, whatever was drafted beside them and in whatever order that is reported."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_prices import prices_of
from sweeps import sweep

from protocol.pass_price import PassPrice
from protocol.prices import MAX_RULES, Mean, Prices

deterministic = settings(max_examples=40)


# --- a pass of the target -------------------------------------------------------------------------


@given(
    base=st.floats(1e-3, 1e3),
    slope=st.floats(0, 1),
    delay=st.floats(0, 0.85),
    seed=st.integers(0, 1000),
)
@deterministic
def test_an_affine_price_is_found(base, slope, delay, seed):
    price, dice = PassPrice(), random.Random(seed)
    # The first measurement is the unit of the prior.
    price.observe(1, 0.0, base)
    for _ in range(300):
        width, overlap = dice.randint(1, 9), base * dice.random()
        price.observe(width, overlap, base * (1 + slope * (width - 1)) + delay * overlap)
    # The prior keeps a little weight.
    assert price(1) == pytest.approx(base, rel=0.05)
    assert price.per_row(9) == pytest.approx(base * slope, abs=0.02 * base)
    assert price.target_slowdown == pytest.approx(delay, abs=0.06)
    assert price(6, base) == pytest.approx(base * (1 + 5 * slope) + delay * base, rel=0.05)


@sweep("width", [1, 4])
@sweep("overlap", [0.0, 0.5])
def test_a_constant_price_is_learnt_and_a_prior_without_evidence_stays(width, overlap):
    first, price = PassPrice(), PassPrice()
    first.observe(width, overlap, 2.0)
    for _ in range(100):
        price.observe(width, overlap, 2.0)
    assert price(width, overlap) == pytest.approx(2.0, rel=1e-6)
    assert price.per_row(width + 8) == pytest.approx(first.per_row(width + 8), rel=0.2)
    assert 0 <= price.target_slowdown <= 0.9


def test_passes_that_tell_nothing_leave_the_slowdown_as_it_was():
    price, dice = PassPrice(), random.Random(0)
    for _ in range(40):
        overlap = dice.choice([0.0, 1.0])
        price.observe(1, overlap, 2.0 + 0.5 * overlap)
    before = price.target_slowdown
    # As in a long rest, on a machine with some noise.
    for _ in range(1000):
        price.observe(dice.choice([1, 4]), 0.0, dice.uniform(1.8, 2.2))
    assert before == pytest.approx(0.5, abs=0.05)
    assert price.target_slowdown == pytest.approx(before, abs=0.05)


# As from a clock that counts nanoseconds.
seconds = st.just(0.0) | st.floats(1e-9, 100)
passes = st.lists(st.tuples(st.integers(1, 65), seconds, seconds), max_size=30)


@given(seen=passes, width=st.integers(1, 65), overlap=st.floats(0, 100))
@deterministic
def test_whatever_was_seen_no_price_is_negative_or_infinite(seen, width, overlap):
    price = PassPrice()
    for each in seen:
        price.observe(*each)
        assert 0 <= price(width, overlap) < math.inf
        assert 0 <= price.per_row(width) < math.inf
        assert 0 <= price.target_slowdown <= 0.9


@pytest.mark.parametrize("slope", [0.5, 1.0, 1.1])
def test_noise_beside_wide_passes_does_not_make_a_pass_over_one_token_free(slope):
    for seed in range(100):
        noise, price = random.Random(seed), PassPrice()
        for width in (1, 2, 4, 8, 1, 2, 4, 8, 16, 16):
            price.observe(width, 0.0, 0.05 * (1 + slope * (width - 1)) * noise.lognormvariate(0.0, 0.5))
        assert 0.01 < price(1) < 0.25


def test_no_pass_takes_less_than_its_share_of_the_narrowest_that_was_seen():
    for seed in range(100):
        noise, price = random.Random(seed), PassPrice()
        for width in (16, 14, 16, 20):
            price.observe(width, 0.0, 0.05 * noise.lognormvariate(0.0, 0.5))
        assert all(price(rows) >= price(14) * rows / 14 > 0.0 for rows in range(1, 14))


def test_one_pass_in_which_the_machine_did_something_else_bends_nothing():
    dice = random.Random(0)
    price, undisturbed = PassPrice(), PassPrice()
    for i in range(200):
        width, overlap = dice.randint(1, 6), dice.random()
        seconds = 1.0 + 0.1 * (width - 1) + 0.3 * overlap
        price.observe(width, overlap, 1000.0 if i == 150 else seconds)
        undisturbed.observe(width, overlap, seconds)
    assert price(1) == pytest.approx(undisturbed(1), rel=0.1)
    assert price.per_row(6) == pytest.approx(undisturbed.per_row(6), abs=0.03)


@sweep("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_machine_that_changes_its_pace_is_followed(factor):
    price = PassPrice()
    for i in range(600):
        width = 1 + i % 4
        price.observe(width, 0.0, (1.0 if i < 200 else factor) * (1.0 + 0.25 * (width - 1)))
    assert price(1) == pytest.approx(factor, rel=0.05)
    assert price.per_row(4) == pytest.approx(0.25 * factor, rel=0.2)


# --- passes, and drafts beside them ---------------------------------------------------------------


def test_the_time_that_a_drafter_worked_beside_a_pass_is_what_counts():
    prices = Prices()
    widths = itertools.cycle([1, 2, 4])
    at, dice = 0.0, random.Random(0)
    for _ in range(300):
        width, begins, works = next(widths), dice.random(), dice.random()
        # Two steps: one that began before the pass, one within it.
        early = 0.25 * dice.random()
        overlap = early + works
        seconds = 2.0 + 0.25 * (width - 1) + 0.4 * overlap
        prices.observe_draft_step(1, at - 0.125, at + early, beside_target=True)
        prices.observe_draft_step(1, at + early + 0.1 * begins, at + early + 0.1 * begins + works, beside_target=True)
        prices.observe_verify_pass(width, at, at + seconds)
        at += seconds + 1.0
    assert prices.verify(1) == pytest.approx(2.0, rel=0.05)
    assert prices.verify.per_row(4) == pytest.approx(0.25, rel=0.1)
    assert prices.verify.target_slowdown == pytest.approx(0.4, abs=0.05)


def test_a_drafter_that_reads_works_beside_the_target_too():
    prices, at = Prices(), 0.0
    for round in range(200):
        works = round % 2 * (0.5 + 0.5 * (round % 4 > 1))
        if works and round % 10 < 5:
            prices.observe_draft_reading(at, at + works)
        elif works:
            prices.observe_draft_step(1, at, at + works, beside_target=True)
        prices.observe_verify_pass(1, at, at + 2.0 + 0.5 * works)
        at += 4.0
    assert prices.verify(1) == pytest.approx(2.0, rel=0.02)
    assert prices.verify.target_slowdown == pytest.approx(0.5, abs=0.05)


def test_on_shared_cores_a_pass_has_its_share_until_the_drafter_rests():
    alone, beside, hold = Prices(), Prices(), Prices(core_hold_s=3.0)
    for prices in (alone, beside, hold):
        at = 0.0
        for round in range(400):
            drafts = prices is not alone and round % 40 >= 20
            if drafts:
                prices.observe_draft_step(1, at + 0.1, at + 0.2, beside_target=True)
            seconds = 1.5 if drafts else 1.0
            prices.observe_verify_pass(1, at, at + seconds)
            at += seconds + (1.0 if round % 20 < 19 else 9.0)
    # A tenth of a second of drafting explains no half of a second; half of the cores do.
    assert hold.verify(1) == pytest.approx(alone.verify(1), rel=0.1)
    assert beside.verify(1) > 1.15 * alone.verify(1)
    assert hold.verify.target_slowdown == pytest.approx(0.5 / 1.5, abs=0.05)


def test_on_shared_cores_a_drafter_that_takes_turns_with_the_target_leaves_it_all_cores():
    prices, at = Prices(core_hold_s=3.0), 0.0
    for _ in range(100):
        prices.observe_draft_step(1, at, at + 0.1, beside_target=False)
        prices.observe_verify_pass(2, at + 0.1, at + 1.1)
        at += 1.1
    assert prices.verify(2) == pytest.approx(1.0)
    # Nobody works ahead where that takes half of the cores for a pass that lasts ten steps.
    assert prices.modelled_rate(0.5) == pytest.approx(1.5 / 1.1, rel=0.05)


spans = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=4)


@given(drafts=st.lists(spans, min_size=3, max_size=12), seed=st.integers(0, 100))
@deterministic
def test_passes_and_drafts_beside_them_are_priced_in_any_order(drafts, seed):
    """A draft step that ended before the pass is usually reported before it, but its task may run later."""
    dice = random.Random(seed)
    sorted_out, as_it_comes = Prices(), Prices()
    at = 0.0
    for steps in drafts:
        # One after the other, all within the pass except the last, which ends after it.
        ends, now = [], at
        for gap, length in steps:
            ends.append((now + gap, now + gap + length))
            now += gap + length
        seconds, width = now - at, dice.randint(1, 4)
        for began, ended in ends:
            sorted_out.observe_draft_step(1, began, ended, beside_target=True)
        sorted_out.observe_verify_pass(width, at, at + seconds - 0.25 * steps[-1][1])
        heard = [lambda b=b, e=e: as_it_comes.observe_draft_step(1, b, e, beside_target=True) for b, e in ends[:-1]]
        for hear in heard:
            hear()
        as_it_comes.observe_verify_pass(width, at, at + seconds - 0.25 * steps[-1][1])
        as_it_comes.observe_draft_step(1, *ends[-1], beside_target=True)
        at += seconds + 0.5
    for prices in (sorted_out, as_it_comes):
        prices.observe_draft_step(1, at + 100, at + 101, beside_target=True)
    assert as_it_comes.verify(1) == pytest.approx(sorted_out.verify(1), rel=1e-9, abs=1e-12)
    assert as_it_comes.verify.target_slowdown == pytest.approx(sorted_out.verify.target_slowdown, rel=1e-9, abs=1e-12)


def test_a_draft_step_beside_the_target_says_how_much_slower_it_is_there():
    prices = Prices()
    for i in range(20):
        prices.observe_draft_step(1, i, i + 0.25, beside_target=False)
    for i in range(20, 40):
        prices.observe_draft_step(1, i, i + 0.375, beside_target=True)
    assert prices.draft_s(1, beside_target=False) == pytest.approx(0.25)
    assert prices.draft_s(1, beside_target=True) == pytest.approx(0.375)


def test_before_a_step_was_seen_alone_one_beside_the_target_stands_for_it():
    prices = Prices()
    prices.observe_draft_step(1, 0.0, 0.5, beside_target=True)
    assert prices.draft_s(1, beside_target=False) == 0.5


# --- gains of speculation -------------------------------------------------------------------------


measured = st.builds(
    prices_of, slope=st.floats(0, 0.8), step=st.floats(0.01, 1.5), delay=st.sampled_from([0.0, 0.3, 0.9])
)


@given(prices=measured, one=st.floats(0, 1), other=st.floats(0, 1))
@settings(max_examples=40)
def test_a_drafter_that_is_right_more_often_is_modelled_to_bring_no_less(prices, one, other):
    less, more = sorted((one, other))
    assert 0 < prices.modelled_rate(less) <= prices.modelled_rate(more)


def test_a_free_and_right_drafter_is_worth_many_tokens_a_wrong_one_none():
    prices = prices_of(slope=0.0, step=0.001)
    assert prices.modelled_rate(1.0) > 8 * prices.plain_rate
    assert prices.modelled_rate(0.0) < 1.02 * prices.plain_rate


def test_what_a_second_is_worth_is_never_less_than_plain_decoding():
    prices = prices_of()
    for tokens, seconds in ((1, 4.0), (6, 1.0)):
        for _ in range(400):
            prices.observe_round(tokens, seconds)
        assert prices.speculative_rate == pytest.approx(tokens / seconds, rel=0.01)
        assert prices.rate == pytest.approx(max(1.0, tokens / seconds), rel=0.01)


def test_speculating_afresh_is_as_good_as_its_model():
    prices = prices_of()
    for _ in range(100):
        prices.observe_round(1, 50.0)
    before = prices.speculative_rate
    prices.reset_speculative_rate()
    assert prices.speculative_rate == pytest.approx(prices.modelled_rate(prices.estimates().acceptance))
    assert prices.speculative_rate > before


def test_the_estimates_are_what_was_measured():
    prices = prices_of(base=2.0, slope=0.25, step=0.125, delay=0.5)
    prices.observe_round(3, 2.0)
    estimates = prices.estimates()
    assert estimates.verify_seconds == prices.verify(1) == pytest.approx(2.0, rel=0.05)
    assert estimates.verify_seconds_per_token == prices.verify.per_row(5) == pytest.approx(0.5, rel=0.05)
    assert estimates.verify_table == prices.verify.table()
    assert estimates.draft_seconds == pytest.approx(0.125)
    assert estimates.plain_seconds == pytest.approx(2.0)
    assert estimates.tokens_per_second == pytest.approx(1.5)
    assert estimates.contention == pytest.approx(0.5, abs=0.1)
    assert 0 <= estimates.acceptance <= 1


def test_before_anything_was_measured_the_estimates_are_nothing():
    estimates = Prices().estimates()
    assert (estimates.verify_seconds, estimates.verify_seconds_per_token, estimates.draft_seconds) == (0, 0, 0)
    assert (estimates.plain_seconds, estimates.tokens_per_second) == (0, 0)
    assert not Prices().is_known


# --- means ----------------------------------------------------------------------------------------


def test_a_mean_begins_with_the_first_value_and_forgets():
    mean = Mean(memory=10.0)
    assert (mean.is_known, mean.value) == (False, 0.0)
    mean.observe(4.0)
    assert (mean.is_known, mean.value) == (True, 4.0)
    mean.observe(2.0)
    assert mean.value == 3.0
    for _ in range(100):
        mean.observe(-1.0)
    assert mean.value == pytest.approx(-1.0, abs=1e-3)


# --- readers and rules ----------------------------------------------------------------------------


def test_reading_prices_writes_nothing():
    prices = Prices()
    for began in range(4):
        prices.observe_draft_step(1, began, began + 0.25, beside_target=False)
        prices.observe_verify_pass(1 + began, began + 0.25, began + 1.0)
        before = repr(prices)
        assert prices.estimates().verify_seconds >= 0.0
        assert (prices.rate, prices.modelled_rate(0.5), prices.draft_s(3, beside_target=True)) > (0.0, 0.0, 0.0)
        # Another thread reads while this one measures: a solution put back late would be one of old sums.
        assert repr(prices) == before


def test_what_was_learnt_is_remembered_for_the_rules_that_were_asked_for_last():
    prices = Prices()
    at_work = prices.calibration(("match", 0.0))
    kept = prices.calibration(("match", 0.1))
    for number in range(1000):
        prices.calibration(("rejection", number))
        assert prices.calibration(("match", 0.1)) is kept
    assert len(prices._calibrations) == MAX_RULES
    assert prices.calibration(("match", 0.0)) is not at_work
    assert prices.calibration(("rejection", 999)) is prices.calibration(("rejection", 999))


def test_a_step_alone_is_never_believed_to_take_longer_than_one_beside_the_target() -> None:
    prices = Prices()
    for at in range(4):  # while the machine was busy with something else
        prices.observe_draft_step(1, at, at + 0.029, beside_target=False)
    for at in range(4, 100):
        prices.observe_draft_step(1, at, at + 0.005, beside_target=True)
    assert prices.draft_s(1, beside_target=False) == pytest.approx(0.005, rel=0.1)
    assert prices.draft_s(1, beside_target=True) == pytest.approx(0.005, rel=0.1)


@pytest.mark.parametrize(("delay", "draft", "is_one"), [(0.9, 0.4, True), (0.0, 0.6, False), (0.0, 0.02, True)])
def test_a_fixed_lookahead_is_one_group_where_overlap_gains_nothing(delay: float, draft: float, is_one: bool) -> None:
    """It gains nothing where it delays the pass by as long as it takes, or takes no time worth speaking of."""
    prices = Prices()
    prices.drafts_together = True
    for i in range(400):
        rows, overlap = 1 + i % 12, (i // 12 % 3) * 0.3
        prices.verify.observe(rows, overlap, 1.0 + 0.02 * rows + delay * overlap)
        prices.observe_draft_step(1 + i % 4, 2.0 * i, 2.0 * i + draft, beside_target=False)
    assert prices.one_group_pays(4, 2) == is_one


def test_two_groups_of_one_batch_compute_all_its_rows_twice() -> None:
    prices = Prices()
    prices.drafts_together = True
    for i in range(100):
        prices.verify.observe(1 + i % 48, 0.0, 0.1 * (1 + i % 48))
        prices.observe_draft_step(1 + i % 16, 2.0 * i, 2.0 * i + 0.5, beside_target=False)
    assert not prices.one_group_pays(16, 2)
    assert not prices.one_group_pays(16, 2, num_rows=8)
    assert prices.one_group_pays(16, 2, num_rows=16)


def test_copies_of_few_texts_bear_the_width_and_the_lost_plain_pass() -> None:
    prices = Prices(num_texts=8)
    for rows in (1, 8, 16, 32) * 8:
        prices.verify.observe(rows, 0.0, 1.0 + 0.1 * (rows - 1))

    def extra_s(*, only_copies: bool = True) -> float:
        return prices.extra_seconds(only_copies=only_copies)(1)

    assert extra_s(only_copies=False) == pytest.approx(0.1)
    assert extra_s() == pytest.approx(0.8)
    prices.num_copying = 4
    assert extra_s() == pytest.approx(0.2)
    for _ in range(30):
        prices.observe_gap(0.4)
    assert extra_s() == pytest.approx(0.3)
    for _ in range(30):
        prices.observe_plain_round(1.5, num_texts=8)  # a pass that is not started ahead takes 1.7
    assert extra_s() == pytest.approx(0.4)  # neither this one nor the next is
    assert extra_s(only_copies=False) == pytest.approx(0.1)
    prices.num_copying = 20  # some of them wait for another pass
    assert extra_s() == pytest.approx(1.6 / 8)


def test_plain_rounds_of_an_unseen_number_are_priced_like_the_nearest() -> None:
    prices = Prices()
    for rows in (1, 4, 16) * 8:
        prices.verify.observe(rows, 0.0, 1.0 + 0.1 * (rows - 1))
    prices.num_texts = 4
    assert prices.plain_rate == pytest.approx(4 / 1.3)
    prices.observe_plain_round(0.5)
    assert prices.plain_rate == pytest.approx(4 / (1.3 / 2))
    prices.observe_plain_round(1.25, num_texts=16)
    assert prices.plain_rate == pytest.approx(4 / (1.3 / 2))
    prices.num_texts = 9
    assert prices.plain_rate == pytest.approx(9 / (1.8 / 2))
    prices.observe_plain_round(1.0, num_texts=9)
    prices.observe_plain_round(99.0, num_texts=9)  # the machine did something else
    assert prices.plain_rate == pytest.approx(9 / 2.0)


def test_the_speculative_rate_of_many_texts_says_nothing_of_one() -> None:
    prices = Prices(num_texts=8)
    prices.observe_round(4, 0.01)
    assert prices.speculative_rate == pytest.approx(400.0)
    prices.num_texts = 1
    assert prices.speculative_rate == 0.0
    prices.observe_round(2, 0.02)
    assert prices.speculative_rate == pytest.approx(100.0)
    prices.num_texts = 9
    assert prices.speculative_rate == pytest.approx(400.0)
