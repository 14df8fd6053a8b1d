"""Tables for a terminal of any width: a table that is too wide is split or stacked, and no number is ever cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import Console

# Blanks between two columns.
_GAP = 2

# Wider than any table or line: where no terminal shows what is printed, nothing needs to be split or wrapped.
UNBOUNDED = 100_000


@attrs.frozen
class Row:
    """A row of a table.

    Attributes:
        cells: one a column; those that are missing at the end stay empty.
        style: of the whole row, in rich's terms; "" for none.
    """

    cells: tuple[str, ...]
    style: str = ""


@attrs.frozen
class Sheet:
    """A table: headings, and rows of cells.

    Attributes:
        headings: one a column; may have several lines.
        rows: in order.
        num_labels: so many columns at the front, >= 1, say which row it is. They stand in front of each part of a
            table that is split.
        is_grouped: whether rows with the same first label are a group: the label is shown once, and a line stands
            between two groups.
    """

    headings: tuple[str, ...]
    rows: tuple[Row, ...]
    num_labels: int = 1
    is_grouped: bool = False

    def width(self, column: int) -> int:
        """Characters that a column takes."""
        from rich.cells import cell_len

        texts = [self.headings[column], *(self.cell(row, column) for row in self.rows)]
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    def cell(self, row: Row, column: int) -> str:
        """The text of a cell, "" where there is none."""
        return row.cells[column] if column < len(row.cells) else ""

    def parts(self, width: int) -> list[list[int]] | None:
        """The columns of each part of the table, so that each part is at most `width` characters wide.

        None where not even a single column fits beside the labels.
        """
        labels = list(range(self.num_labels))
        taken = sum(self.width(column) + _GAP for column in labels) - _GAP
        parts: list[list[int]] = []
        room = 0
        for column in range(self.num_labels, len(self.headings)):
            needed = _GAP + self.width(column)
            if taken + needed > width:
                return None
            if not parts or needed > room:
                parts.append([*labels])
                room = width - taken
            parts[-1].append(column)
            room -= needed
        return parts


def show_table(console: Console, sheet: Sheet) -> None:
    """Print a table on a console: whole where it fits, else in parts below each other, else row by row."""
    parts = sheet.parts(console.width)
    if parts is None:
        _show_stacked(console, sheet)
        return
    for number, columns in enumerate(parts):
        if number > 0:
            console.print()
        _show_part(console, sheet, columns)


def _show_part(console: Console, sheet: Sheet, columns: Sequence[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column in columns:
        is_label = column < sheet.num_labels
        is_number = not is_label or (sheet.is_grouped and column == 0)
        table.add_column(sheet.headings[column], justify="right" if is_number else "left", no_wrap=True)
    before: str | None = None
    for row in sheet.rows:
        cells = [sheet.cell(row, column) for column in columns]
        if sheet.is_grouped:
            group = cells[0]
            if before is not None and group != before:
                table.add_section()
            if group == before:
                cells[0] = ""
            before = group
        table.add_row(*map(Text, cells), style=row.style or None)
    console.print(table)


def _show_stacked(console: Console, sheet: Sheet) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for number, row in enumerate(sheet.rows):
        if number > 0:
            console.print()
        title = " ".join(sheet.cell(row, column) for column in range(sheet.num_labels))
        console.print(title, style=row.style or "bold", markup=False, overflow="fold")
        for line in _stacked_lines(sheet, row):
            console.print(Padding(Text(line), (0, 0, 0, _GAP)))


def _stacked_lines(sheet: Sheet, row: Row) -> Iterator[str]:
    for column in range(sheet.num_labels, len(sheet.headings)):
        if cell := sheet.cell(row, column):
            yield f"{' '.join(sheet.headings[column].split())}  {cell}".strip()


def show_sections(console: Console, sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
    """Print titled lists of names and findings on a console; a finding that is too long goes on in the next line."""
    for number, (title, rows) in enumerate(sections):
        console.print("\n" * (number > 0) + title, style="bold", markup=False, overflow="fold")
        show_pairs(console, rows)


def show_pairs(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and what belongs to them, side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, _GAP))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, finding in rows:
        table.add_row(Text(name), Text(finding))
    console.print(table)
