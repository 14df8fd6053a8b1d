"""Sweeps run every case, and name the one that fails."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from sweeps import sweep


def groups_of(test: Any) -> dict[str, dict[str, Any]]:
    """The arguments of each test that pytest would make of a sweep, by its id."""
    (mark,) = test.pytestmark
    name, params = mark.args
    return {param.id: {name: param.values[0]} for param in params}


def test_the_first_case_that_fails_is_named() -> None:
    seen = []

    @sweep(("one", "other"), [(1, "a"), (2, "b"), (3, "c")])
    def test(one: int, other: str) -> None:
        seen.append(one)
        assert one != 2

    with pytest.raises(AssertionError) as failed:
        test(**groups_of(test)["all"])
    assert failed.value.__notes__ == ["with one=2, other='b'"]
    assert seen == [1, 2]


def test_cases_with_marks_are_a_test_of_their_own_and_sweeps_multiply() -> None:
    seen = []

    @sweep("other", "ab")
    @sweep("one", [1, pytest.param(2, marks=pytest.mark.slow), 3])
    async def test(one: int, other: str) -> None:
        seen.append((one, other))

    inner, outer = test.pytestmark
    fixed = {outer.args[0]: outer.args[1][0].values[0]}
    rest, slow = inner.args[1]
    assert [param.marks for param in (rest, slow)] == [(), (pytest.mark.slow,)]

    async def run(param: Any) -> None:
        await test(**fixed, **{inner.args[0]: param.values[0]})

    trio.run(run, slow)
    assert seen == [(2, "a"), (2, "b")]
    trio.run(run, rest)
    assert seen[2:] == [(1, "a"), (3, "a"), (1, "b"), (3, "b")]


def test_a_case_that_is_skipped_is_an_error_since_the_others_would_be_too() -> None:
    @sweep("n", range(3))
    def test(n: int) -> None:
        pytest.skip("not here")

    with pytest.raises(AssertionError, match="not here"):
        test(**groups_of(test)["all"])
