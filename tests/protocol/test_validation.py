"""Whole numbers and numbers are checked in one place, and every message has the same form."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import SettingsError
from protocol.validation import check_integer, check_integers, check_number, is_integer

HUGE = 10**400  # no float is as large
NAN, INF = math.nan, math.inf
NOT_NUMBERS = ["1", b"1", "", None, [], (1,), {}, 1j, Fraction(2), Decimal(2), np.int64(1), np.bool_(True)]
NOT_INTEGERS = [*NOT_NUMBERS, True, False, 1.0, 2.5, NAN, INF, -INF, np.float64(1.0), mx.array(1)]
NO_FINITE_NUMBERS = [*NOT_NUMBERS, True, False, NAN, INF, -INF, HUGE, -HUGE, np.float64("nan"), np.float32(0.5)]

deterministic = settings(max_examples=100)


def message_of(check, *arguments, **options) -> str:
    with pytest.raises(SettingsError) as caught:
        check(*arguments, **options)
    return str(caught.value)


# --- whole numbers --------------------------------------------------------------------------------


@given(value=st.integers(), low=st.integers(), high=st.none() | st.integers())
@deterministic
def test_a_whole_number_is_allowed_just_within_its_bounds(value, low, high):
    if low <= value and (high is None or value <= high):
        check_integer("size", value, low, high)
        check_integers("sizes", (low, value, value), low, high)
    else:
        assert f", got {value}" in message_of(check_integer, "size", value, low, high)
        assert f", got {value} among them" in message_of(check_integers, "sizes", (value,), low, high)


@sweep("value", NOT_INTEGERS)
def test_nothing_but_an_int_is_a_whole_number(value):
    assert not is_integer(value)
    assert message_of(check_integer, "size", value, 0, 5).startswith("size must be a whole number between 0 and 5, got")
    assert message_of(check_integers, "sizes", (1, value), 0, 5).startswith("sizes must be whole numbers between 0 and")


@sweep(
    ("options", "message"),
    [
        ({}, "size must be a whole number of at least 1, got 0"),
        ({"high": 64}, "size must be a whole number between 1 and 64, got 0"),
        ({"or_none": "no limit"}, "size must be a whole number of at least 1, or None for no limit, got 0"),
        ({"or_auto": True}, 'size must be a whole number of at least 1, or "auto", got 0'),
        ({"remedy": "use 1 for one"}, "size must be a whole number of at least 1, got 0; use 1 for one"),
    ],
)
def test_a_message_says_name_bounds_value_and_remedy(options, message):
    assert message_of(check_integer, "size", 0, 1, **options) == message


def test_none_and_auto_are_allowed_only_where_it_is_said():
    check_integer("size", None, 1, or_none="no limit")
    check_integer("size", "auto", 1, or_auto=True)
    check_integers("sizes", ("auto", 3), 1, or_auto=True)
    check_number("share", None, 0, or_none="no share")
    assert message_of(check_integer, "size", None, 1, or_auto=True).endswith("got None")
    assert message_of(check_integer, "size", "auto", 1, or_none="no limit").endswith("got 'auto'")
    assert message_of(check_integers, "sizes", ("often",), 1, 9, or_auto=True) == (
        "sizes must be whole numbers between 1 and 9 or \"auto\", got 'often' among them"
    )


# --- numbers --------------------------------------------------------------------------------------


@given(
    value=st.floats() | st.integers(),
    low=st.none() | st.floats(-5, 5),
    high=st.none() | st.floats(-5, 5),
    above=st.none() | st.floats(-5, 5),
)
@deterministic
def test_a_number_is_allowed_just_within_its_bounds(value, low, high, above):
    is_allowed = (
        math.isfinite(value)
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if is_allowed:
        check_number("share", value, low, high, above=above)
    else:
        assert "got" in message_of(check_number, "share", value, low, high, above=above)


@sweep("value", NO_FINITE_NUMBERS)
@sweep("bounds", [(), (0,), (0, 1)])
def test_nothing_else_is_a_finite_number(value, bounds):
    assert message_of(check_number, "share", value, *bounds).startswith("share must be a")


@sweep(
    ("options", "message"),
    [
        ({}, "share must be a finite number, got nan"),
        ({"low": 0}, "share must be a finite number of at least 0, got nan"),
        ({"low": 0, "high": 0.5}, "share must be a number between 0 and 0.5, got nan"),
        ({"high": 0.5}, "share must be a number of at most 0.5, got nan"),
        ({"above": 0}, "share must be a finite number above 0, got nan"),
        ({"above": 0, "high": 1}, "share must be a finite number above 0 and of at most 1, got nan"),
        ({"low": 0, "or_none": "all"}, "share must be a finite number of at least 0, or None for all, got nan"),
        ({"low": 0, "remedy": "use 0"}, "share must be a finite number of at least 0, got nan; use 0"),
    ],
)
def test_the_message_about_a_number_has_the_same_form(options, message):
    assert message_of(check_number, "share", NAN, **options) == message
