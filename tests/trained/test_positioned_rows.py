"""Rows of successive positions: whatever is added and dropped, each row is that of its position."""

from __future__ import annotations

import random

import mlx.core as mx
from sweeps import sweep

from actors.trained.positioned_rows import PositionedRows

ROWS = mx.arange(600).reshape(300, 2)


@sweep("seed", range(8))
def test_each_row_is_that_of_its_position(seed: int) -> None:
    draws = random.Random(seed)
    rows = PositionedRows()
    for _ in range(60):
        match draws.choice(("add", "add", "drop_from", "drop_before", "gap")):
            case "add":
                start = rows.end if rows.pieces else draws.randrange(5)
                rows.add(start, ROWS[start : start + draws.choice((1, 3, 40))])
            case "gap":
                rows.add(start := draws.randrange(100, 120), ROWS[start : start + 2])
                assert (rows.begin, rows.end) == (start, start + 2) or rows.end == start + 2
            case "drop_from":
                rows.drop_from(draws.randint(max(0, rows.begin - 2), rows.end + 2))
            case "drop_before":
                rows.drop_before(draws.randint(max(0, rows.begin - 2), rows.end))
        assert sum(piece.shape[0] for piece in rows.pieces) == rows.end - rows.begin
        if rows.pieces:
            begin = draws.randrange(rows.begin, rows.end)
            end = draws.randint(begin + 1, rows.end)
            assert mx.array_equal(rows.between(begin, end), ROWS[begin:end])


def test_adding_does_not_copy_what_is_there() -> None:
    rows = PositionedRows()
    for position in range(200):
        rows.add(position, ROWS[position : position + 1])
    first, *_ = rows.pieces
    assert 3 <= len(rows.pieces) <= 5
    rows.add(200, ROWS[200:203])
    assert rows.pieces[0] is first
    assert rows.num_bytes == 203 * ROWS[0].nbytes
    # Of another drafter.
    rows.add(203, mx.zeros((2, 5)))
    assert (rows.begin, rows.end) == (203, 205)
    rows.clear()
    assert (rows.begin, rows.end, rows.pieces) == (0, 0, [])
