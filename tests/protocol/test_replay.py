"""The price of a pass by its width, and the rule that settles tokens that must be fed again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.prices import WidthPrice
from protocol.replay import ReplayDebt

seconds = st.floats(1e-4, 10.0)
widths = st.lists(st.integers(1, 40), min_size=2, max_size=60)


@given(base=seconds, per_token=st.floats(0.0, 1.0), widths=widths, asked=st.integers(1, 60))
def test_an_affine_price_is_found(base: float, per_token: float, widths: list[int], asked: int) -> None:
    price = WidthPrice()
    for width in widths:
        price.observe(width, base + per_token * width)
    if len(set(widths)) > 1:
        assert math.isclose(price(asked), base + per_token * asked, rel_tol=1e-4, abs_tol=1e-5)
        assert math.isclose(price.per_token, per_token, rel_tol=1e-4, abs_tol=1e-5)
    else:
        assert price.per_token == 0
        assert math.isclose(price(asked), base + per_token * widths[0], rel_tol=1e-6)


@given(observed=st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 10.0)), max_size=60), asked=st.integers(1, 60))
def test_no_price_is_negative_whatever_was_observed(observed: list[tuple[int, float]], asked: int) -> None:
    price = WidthPrice()
    for width, took in observed:
        price.observe(width, took)
    assert price(asked) >= 0
    assert price.per_token >= 0


def test_a_price_that_changes_is_followed() -> None:
    price = WidthPrice(memory=20)
    for _ in range(100):
        for width in (1, 4):
            price.observe(width, 1.0 + 0.1 * width)
    for _ in range(100):
        for width in (1, 4):
            price.observe(width, 3.0 + 0.5 * width)
    assert price(4) == pytest.approx(5.0, rel=1e-3)
    assert price.per_token == pytest.approx(0.5, rel=1e-3)


def affine(base: float, per_token: float) -> WidthPrice:
    price = WidthPrice()
    for width in (1, 2, 5):
        price.observe(width, base + per_token * width)
    return price


@given(base=seconds, per_token=st.floats(1e-3, 1.0), per_round=st.integers(1, 8))
def test_what_is_carried_until_it_is_settled_costs_about_one_pass(
    base: float, per_token: float, per_round: int
) -> None:
    price, debt = affine(base, per_token), ReplayDebt()
    pending, rent = 0, 0.0
    for _ in range(100_000):
        pending += per_round
        rent += pending * price.per_token
        if debt.should_settle(pending, price, seconds_per_token=0.0):
            break
    else:
        pytest.fail("never settled")
    # Not before the rent has reached the price of settling, and not later than the round in which it does.
    assert rent > price(pending + 1) * (1 - 1e-6)
    assert rent - pending * price.per_token <= price(pending - per_round + 1) * (1 + 1e-6)


def test_nothing_pending_is_nothing_owed() -> None:
    price, debt = affine(1.0, 0.3), ReplayDebt()
    # The rent of one round with two tokens is less than a pass. What was paid before the debt was cleared does not
    # count towards the next debt.
    for _ in range(50):
        assert not debt.should_settle(2, price, 0.0)
        assert not debt.should_settle(0, price, 0.0)


def test_width_that_costs_nothing_is_carried_for_ever() -> None:
    price, debt = affine(1.0, 0.0), ReplayDebt()
    assert not any(debt.should_settle(pending, price, 0.5) for pending in range(1, 1000))


def test_a_settled_debt_begins_anew() -> None:
    price, debt = affine(1.0, 0.5), ReplayDebt()
    settled = [debt.should_settle(2, price, 0.0) for _ in range(9)]
    assert settled == [False, False, True] * 3
