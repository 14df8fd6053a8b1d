"""Measuring links, seen from one rank: what it sends, and whom it believes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sweeps import sweep

from actors.distributed import links
from protocol.errors import RankError
from protocol.rank_messages import CloseTarget, Loaded, Measure, Measured, RankMessage


def group(rank: int, *received: tuple[int, RankMessage]) -> Any:
    """A group of three, as far as it is used; `sent` has what this rank sends."""
    coming, sent = iter(received), []
    return SimpleNamespace(rank=rank, size=3, mlx=None, sent=sent, send=sent.append, receive=lambda: next(coming))


def test_a_link_between_two_others_is_timed_by_the_one_that_sends():
    first = group(0, (1, Measured((0.5, 0.25))))
    assert links._lead_link(first, 1, 2, 4096, 2) == (0.5, 0.25)
    assert first.sent == [Measure("link", (1, 2, 4096, 2))]


def test_a_rank_waits_while_two_others_measure_and_says_what_it_is():
    second = group(
        1,
        (0, Measure("description")),
        (0, Measure("answer")),
        (0, Measure("link", (2, 0, 4096, 2))),
        (0, Measure("end")),
    )
    links.take_part(second, {"host": "second"})
    assert second.sent == [Measured(description={"host": "second"}), Measured()]


@sweep(
    ("asked", "expected"),
    [
        (CloseTarget(), "rank 1 takes part in measurements, and rank 0 sent CloseTarget"),
        (Measure("weather"), r"rank 1 does not know the measurement weather\(\)"),
        (Measure("sum", (4,)), r"rank 1 does not know the measurement sum\(4,\)"),
    ],
)
def test_a_rank_that_is_asked_for_something_else_says_so(asked: RankMessage, expected: str):
    with pytest.raises(RankError, match=expected):
        links.take_part(group(1, (0, asked)), {})


def test_a_rank_that_answers_something_else_is_named():
    with pytest.raises(RankError, match="rank 2 was to take part in a measurement, and sent Loaded"):
        links._answer(group(0, (2, Loaded({}))))
