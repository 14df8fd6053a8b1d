"""Sweeps run every case, and name the one that fails."""

from __future__ import annotations

from typing import Any

import pytest
from sweeps import sweep


@pytest.mark.parametrize("ends", [None, pytest.fail, pytest.skip])
def test_sweeps_multiply_and_name_the_first_case_that_fails_or_would_be_skipped(ends: Any) -> None:
    seen = []

    @sweep("other", "ab")
    @sweep("one", [1, 2, 3])
    def test(one: int, other: str) -> None:
        seen.append((one, other))
        if ends is not None and seen[-1] == (2, "b"):
            ends("not here")

    given = {name: params[0].values[0] for name, params in (mark.args for mark in test.pytestmark)}
    if ends is None:
        test(**given)
    else:
        with pytest.raises((AssertionError, pytest.fail.Exception), match="not here") as failed:
            test(**given)
        assert failed.value.__notes__[-1] == "with other='b'"
        assert "one" in f"{failed.value} {failed.value.__notes__}"
    assert seen == [(1, "a"), (2, "a"), (3, "a"), (1, "b"), (2, "b"), (3, "b")][: 6 if ends is None else 5]
