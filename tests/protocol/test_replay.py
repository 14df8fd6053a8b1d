"""The rule that settles tokens that must be fed again."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.cached_tokens import ReplayDebt

seconds = st.floats(1e-4, 10.0)


@attrs.frozen
class Affine:
    """A price without surprises."""

    base: float
    per_token: float

    def __call__(self, rows: float) -> float:
        return self.base + self.per_token * rows


@given(base=seconds, per_token=st.floats(1e-3, 1.0), per_round=st.integers(1, 8))
def test_what_is_carried_until_it_is_settled_costs_about_one_pass(
    base: float, per_token: float, per_round: int
) -> None:
    price, debt = Affine(base, per_token), ReplayDebt()
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
    price, debt = Affine(1.0, 0.3), ReplayDebt()
    # The rent of one round with two tokens is less than a pass. What was paid before the debt was cleared does not
    # count towards the next debt.
    for _ in range(50):
        assert not debt.should_settle(2, price, 0.0)
        assert not debt.should_settle(0, price, 0.0)


def test_width_that_costs_nothing_is_carried_for_ever() -> None:
    price, debt = Affine(1.0, 0.0), ReplayDebt()
    assert not any(debt.should_settle(pending, price, 0.5) for pending in range(1, 1000))


def test_a_settled_debt_begins_anew() -> None:
    price, debt = Affine(1.0, 0.5), ReplayDebt()
    settled = [debt.should_settle(2, price, 0.0) for _ in range(9)]
    assert settled == [False, False, True] * 3
