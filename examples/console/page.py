"""A page of text that grows: runs of styled characters in lines, wrapped to any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import attrs

from console.cells import clusters, harmless

# "thinking" is a model's reasoning; "note" and "error" are messages of the program.
Style = Literal["plain", "drafted", "thinking", "drafted thinking", "prompt", "note", "error"]


@attrs.frozen
class Run:
    """Characters in one style."""

    text: str
    style: Style = "plain"


Row = tuple[Run, ...]


class Page:
    """The text so far. Adding text takes time in proportion to that text alone, since complete rows are kept."""

    def __init__(self) -> None:
        self._lines: list[list[Run]] = [[]]
        self._width = 1
        self._rows: list[Row] = []  # complete rows at that width
        self._rest: list[Run] = []  # the text after those rows

    @property
    def is_empty(self) -> bool:
        """Whether the page has no text."""
        return self._lines == [[]]

    def write(self, text: str, style: Style) -> None:
        """Add text; control sequences in it are made harmless."""
        first, *others = harmless(text).split("\n")
        self._add(first, style)
        for line in others:
            self._rows += wrap(self._rest, self._width)
            self._rest = []
            self._lines.append([])
            self._add(line, style)

    def begin_line(self) -> None:
        """End the last line unless it is empty."""
        if self._lines[-1]:
            self.write("\n", "plain")

    def rows(self, width: int) -> list[Row]:
        """The text as rows of a width >= 1."""
        if width != self._width:
            self._width = width
            self._rows = [row for line in self._lines[:-1] for row in wrap(line, width)]
            self._rest = list(self._lines[-1])
        rows, begin = _wrapped(self._rest, width)
        self._rows += rows[:-1]
        self._rest = _from(self._rest, begin)
        return [*self._rows, rows[-1]]

    def lines(self) -> list[Row]:
        """The text as unwrapped lines."""
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
    """The rows of a wrapped line without newlines, at least one, of a width >= 1.

    Rows end after words, and blanks beyond the end of a row are dropped. A word longer than a row is cut, and so is a
    word with only blanks before it.
    """
    rows, _ = _wrapped(line, width)
    return rows


def _wrapped(line: Sequence[Run], width: int) -> tuple[list[Row], int]:
    """The rows, and where the last of them begins in the line. Text added to the line changes only the last row."""
    rows: list[Row] = []
    row: list[_Cell] = []
    used, has_ended = 0, False
    for cell in _cells(line, width):
        if used + cell.width > width and row:
            if cell.text == " " and any(before.text != " " for before in row):
                has_ended = True
                continue
            cut = len(row) if has_ended else _after_last_word(row)
            rows.append(_joined(row[:cut]))
            row, has_ended = row[cut:], False
            used = sum(kept.width for kept in row)
        row.append(cell)
        used += cell.width
    return [*rows, _joined(row)], row[0].begin if row else 0


def _cells(line: Sequence[Run], width: int) -> Iterator[_Cell]:
    # A letter and its accent may be in different tokens, so clusters are found in the whole line.
    text = "".join(run.text for run in line)
    styles = [run.style for run in line for _ in run.text]
    for cluster in clusters(text):
        style = styles[cluster.begin]
        if cluster.width <= width:
            yield _Cell(text[cluster.begin : cluster.end], cluster.width, style, cluster.begin)
        else:
            yield _Cell("?", 1, style, cluster.begin)


def _after_last_word(row: Sequence[_Cell]) -> int:
    """Where to cut a row: after its last blank if a word precedes it, else at the end of the row."""
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
    """Append a run, merged with the last one if both have one style."""
    if runs and runs[-1].style == run.style:
        runs[-1] = Run(runs[-1].text + run.text, run.style)
    else:
        runs.append(run)


def _from(line: Sequence[Run], begin: int) -> list[Run]:
    """A line without its first `begin` characters."""
    kept = []
    for run in line:
        if begin < len(run.text):
            kept.append(Run(run.text[begin:], run.style))
        begin = max(0, begin - len(run.text))
    return kept
