"""Rows of successive positions of a text, such as features, in pieces."""

from __future__ import annotations

import copy

import mlx.core as mx

MAX_MERGED = 64  # rows are merged into the last piece as long as that has no more than this


class PositionedRows:
    """(n, width) rows of the positions from `begin` to `end`, in pieces, so that adding some does not copy the rest."""

    def __init__(self) -> None:
        self.begin = 0  # the first position
        self.end = 0  # the position after the last
        self.pieces: list[mx.array] = []  # the rows, in order; lazy

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return sum(piece.nbytes for piece in self.pieces)

    def copy(self) -> PositionedRows:
        """The same rows."""
        rows = copy.copy(self)
        rows.pieces = list(self.pieces)
        return rows

    def clear(self) -> None:
        """Drop all."""
        self.begin = self.end = 0
        self.pieces = []

    def add(self, start: int, rows: mx.array) -> None:
        """Add (n, width) rows of positions from `start` on, lazy or not. Rows that they do not continue are dropped."""
        if start != self.end or not self.pieces or self.pieces[-1].shape[1] != rows.shape[1]:
            self.begin, self.pieces = start, [rows]
        elif self.pieces[-1].shape[0] + rows.shape[0] <= MAX_MERGED:
            self.pieces[-1] = mx.concatenate([self.pieces[-1], rows])
        else:
            self.pieces.append(rows)
        self.end = start + rows.shape[0]

    def between(self, begin: int, end: int) -> mx.array:
        """(end - begin, width) rows of some of the positions, lazy."""
        found = self._pieces_between(begin, end)
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _pieces_between(self, begin: int, end: int) -> list[mx.array]:
        found, start = [], self.begin
        for piece in self.pieces:
            found.append(piece[max(0, begin - start) : max(0, end - start)])
            start += piece.shape[0]
        return [part for part in found if part.shape[0] > 0]

    def drop_from(self, position: int) -> None:
        """Drop the rows of positions from `position` on."""
        if position < self.end:
            self._keep(self.begin, position)

    def drop_before(self, position: int) -> None:
        """Drop the rows of positions before `position`."""
        if position > self.begin:
            self._keep(position, self.end)

    def _keep(self, begin: int, end: int) -> None:
        self.pieces = self._pieces_between(begin, end)
        self.begin, self.end = min(begin, end), end
