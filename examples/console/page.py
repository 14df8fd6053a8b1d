"""The text that grows: runs of characters in styles, in lines that are wrapped to whatever width there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from console.cells import clusters, harmless

# "thinking" is what a model thinks before it answers; "note" and "error" are this program's words.
Style = Literal["plain", "drafted", "thinking", "drafted thinking", "prompt", "note", "error"]


@attrs.frozen
class Run:
    """Characters in one style."""

    text: str
    style: Style = "plain"


Row = tuple[Run, ...]


class Page:
    """All that was written so far. To add something costs the same, however much is there: full rows are kept."""

    def __init__(self) -> None:
        self._lines: list[list[Run]] = [[]]
        self._width = 1
        self._rows: list[Row] = []  # at that width: all that nothing more can be added to
        self._rest: list[Run] = []  # what comes after those rows

    @property
    def is_empty(self) -> bool:
        """Whether nothing was written yet."""
        return self._lines == [[]]

    def write(self, text: str, style: Style) -> None:
        """Add text; what a terminal would obey in it is made harmless."""
        first, *others = harmless(text).split("\n")
        self._add(first, style)
        for line in others:
            self._rows += wrap(self._rest, self._width)
            self._rest = []
            self._lines.append([])
            self._add(line, style)

    def begin_line(self) -> None:
        """End the last line, if there is something in it."""
        if self._lines[-1]:
            self.write("\n", "plain")

    def rows(self, width: int) -> list[Row]:
        """Everything, as it fills rows of some width >= 1."""
        if width != self._width:
            self._width = width
            self._rows = [row for line in self._lines[:-1] for row in wrap(line, width)]
            self._rest = list(self._lines[-1])
        rows, begin = _wrapped(self._rest, width)
        self._rows += rows[:-1]
        self._rest = _from(self._rest, begin)
        return [*self._rows, rows[-1]]

    def lines(self) -> list[Row]:
        """Everything, unwrapped."""
        return [tuple(line) for line in self._lines]

    def _add(self, text: str, style: Style) -> None:
        if text:
            _append(self._lines[-1], Run(text, style))
            _append(self._rest, Run(text, style))


@attrs.frozen
class _Cell:
    text: str
    width: int
    style: Style
    begin: int  # in its line


def wrap(line: Sequence[Run], width: int) -> list[Row]:
    """The rows that a line fills: at least one.

    Args:
        line: without newlines.
        width: in cells, >= 1. A row ends after a word where one does, and blanks that stand beyond its end are not
            shown; a word that is longer than a row is cut, and so is what only blanks are in front of.
    """
    rows, _ = _wrapped(line, width)
    return rows


def _wrapped(line: Sequence[Run], width: int) -> tuple[list[Row], int]:
    """The rows, and where in the line the last of them begins: whatever is added to the line, all before that stay."""
    rows: list[Row] = []
    row: list[_Cell] = []
    used = 0
    for cell in _cells(line, width):
        if used + cell.width > width and row:
            if cell.text == " " and any(before.text != " " for before in row):
                continue
            cut = _after_last_word(row)
            rows.append(_joined(row[:cut]))
            row = row[cut:]
            used = sum(kept.width for kept in row)
        row.append(cell)
        used += cell.width
    return [*rows, _joined(row)], row[0].begin if row else 0


def _cells(line: Sequence[Run], width: int) -> Iterator[_Cell]:
    # Tokens may cut a letter from its accent, so characters are looked for in the line as a whole.
    text = "".join(run.text for run in line)
    styles = [run.style for run in line for _ in run.text]
    for cluster in clusters(text):
        style = styles[cluster.begin]
        if cluster.width <= width:
            yield _Cell(text[cluster.begin : cluster.end], cluster.width, style, cluster.begin)
        else:
            yield _Cell("?", 1, style, cluster.begin)


def _after_last_word(row: Sequence[_Cell]) -> int:
    """Where a row can be cut: behind its last blank, if a word stands before that; else at its end."""
    blanks = (i for i in range(len(row) - 1, 0, -1) if row[i].text == " ")
    last = next(blanks, None)
    if last is None or all(cell.text == " " for cell in row[:last]):
        return len(row)
    return last + 1


def _joined(row: Sequence[_Cell]) -> Row:
    runs: list[Run] = []
    for cell in row:
        _append(runs, Run(cell.text, cell.style))
    return tuple(runs)


def _append(runs: list[Run], run: Run) -> None:
    """Add a run, as a part of the last one where that has its style."""
    if runs and runs[-1].style == run.style:
        runs[-1] = Run(runs[-1].text + run.text, run.style)
    else:
        runs.append(run)


def _from(line: Sequence[Run], begin: int) -> list[Run]:
    """A line without its first characters."""
    kept = []
    for run in line:
        if begin < len(run.text):
            kept.append(Run(run.text[begin:], run.style))
        begin = max(0, begin - len(run.text))
    return kept
