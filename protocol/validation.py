"""Checks of numbers that a user gives, with one form of message: name, bounds, value, remedy. A bool is no number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeGuard

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown

_LARGEST = sys.float_info.max


def must_be(option: str, bound: str, value: Any, remedy: str | None = None, *, among: bool = False) -> SettingsError:
    """An error for a value that is not allowed; with `among`, for one of several values."""
    message = f"{option} must be {bound}, got {shown(value)}" + (" among them" if among else "")
    return SettingsError(message if remedy is None else f"{message}; {remedy}")


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is an int; a bool and numpy's integers are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is an int or a float, NaN and infinity included; a bool is not. numpy's float64 is a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_integer(
    name: str,
    value: Any,
    low: int,
    high: int | None = None,
    *,
    or_none: str | None = None,
    or_auto: bool = False,
    remedy: str | None = None,
) -> None:
    """Check a whole number in [low, high], or of any size with None for `high`.

    `or_none` says what None means, if it is allowed. Raises: SettingsError: the value is not allowed.
    """
    if (value is None and or_none) or (or_auto and _is_auto(value)):
        return
    if not _is_integer_in(value, low, high):
        allowed = f"a whole number {_integer_bounds(low, high)}" + (', or "auto"' if or_auto else "")
        raise must_be(name, _or_none(allowed, or_none), value, remedy)


def check_integers(
    name: str, values: Iterable[Any], low: int, high: int | None = None, *, or_auto: bool = False
) -> None:
    """Check each of several whole numbers; see `check_integer`."""
    for value in values:
        if not (_is_integer_in(value, low, high) or (or_auto and _is_auto(value))):
            allowed = f"whole numbers {_integer_bounds(low, high)}" + (' or "auto"' if or_auto else "")
            raise must_be(name, allowed, value, among=True)


def check_number(
    name: str,
    value: Any,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    or_none: str | None = None,
    remedy: str | None = None,
) -> None:
    """Check a finite number in [low, high] that a float can represent; None is no bound.

    `above` is a lower bound that is not included, in place of `low`. Raises: SettingsError: the value is not allowed.
    """
    if value is None and or_none:
        return
    # Compare: NaN fails every comparison, and math.isfinite raises for an int that is too large for a float.
    is_allowed = (
        is_number(value)
        and (-_LARGEST if low is None else low) <= value <= (_LARGEST if high is None else high)
        and (above is None or above < value)
    )
    if not is_allowed:
        raise must_be(name, _or_none(_number_bounds(low, high, above), or_none), value, remedy)


@attrs.frozen
class Check:
    """A validator of an attrs field: a check with its `bounds`, by which servers describe fields, and options."""

    check: Callable[..., None]
    bounds: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self, _: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        self.check(attribute.name, value, *self.bounds, **self.options)


def validator(check: Callable[..., None], *bounds: Any, **options: Any) -> Any:
    """A `Check`; also a decorator."""
    return Check(check, bounds, options)


integer, number = partial(validator, check_integer), partial(validator, check_number)


@validator
def flag(name: str, value: Any) -> None:
    """A validator of a field that is a bool."""
    if not isinstance(value, bool):
        raise must_be(name, "True or False", value)


def one_of(*allowed: object, spelled: str | None = None) -> Any:
    """A validator of a field that has one of a few values, which are `spelled` in the message."""
    bound = "one of " + ", ".join(map(repr, allowed)) if spelled is None else spelled
    types = tuple({type(value) for value in allowed})

    @validator
    def check(name: str, value: Any) -> None:
        # An array that is compared with a value gives an array.
        if not isinstance(value, types) or value not in allowed:
            raise must_be(name, bound, value)

    return check


def _is_integer_in(value: Any, low: int, high: int | None) -> bool:
    return is_integer(value) and low <= value and (high is None or value <= high)


def _or_none(bound: str, meaning: str | None) -> str:
    return bound if meaning is None else f"{bound}, or None for {meaning}"


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _integer_bounds(low: int, high: int | None) -> str:
    return f"of at least {low}" if high is None else f"between {low} and {high}"


def _number_bounds(low: float | None, high: float | None, above: float | None) -> str:
    if above is not None:
        return f"a finite number above {above:g}" + ("" if high is None else f" and of at most {high:g}")
    if high is not None:
        return f"a number of at most {high:g}" if low is None else f"a number between {low:g} and {high:g}"
    return "a finite number" if low is None else f"a finite number of at least {low:g}"
