"""Tables for a terminal of any width: a table that is too wide is split into parts or stacked, and no cell is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import Console

# Blanks between two columns.
_GAP_COLUMNS = 2

# A width beyond any table or line, for output that no terminal shows: nothing is split or wrapped there.
UNBOUNDED = 100_000


@attrs.frozen
class TableRow:
    """A row of a table, in one of rich's styles; missing cells at the end stay empty."""

    cells: tuple[str, ...]
    style: str = ""


@attrs.frozen
class TextTable:
    """A table: headings of one or more lines, and rows of cells.

    Attributes:
        num_labels: number of columns at the front, >= 1, that name a row. Each part of a split table begins with them.
        is_grouped: whether rows with the same first label form a group, between lines, that shows this label once.
    """

    headings: tuple[str, ...]
    rows: tuple[TableRow, ...]
    num_labels: int = 1
    is_grouped: bool = False

    def width(self, column: int) -> int:
        """Width of a column in terminal columns, gap excluded."""
        from rich.cells import cell_len

        texts = [self.headings[column], *(self.cell(row, column) for row in self.rows)]
        return max(cell_len(line) for text in texts for line in text.split("\n"))

    def cell(self, row: TableRow, column: int) -> str:
        """The text of a cell; "" for a missing one."""
        return row.cells[column] if column < len(row.cells) else ""

    def parts(self, width: int) -> list[list[int]] | None:
        """Columns of the parts into which the table is split, each part at most `width` terminal columns wide.

        Returns: lists of column indices; None if some column does not fit beside the labels.
        """
        labels = list(range(self.num_labels))
        labels_width = sum(self.width(column) + _GAP_COLUMNS for column in labels) - _GAP_COLUMNS
        parts: list[list[int]] = []
        free_width = 0
        for column in range(self.num_labels, len(self.headings)):
            needed = _GAP_COLUMNS + self.width(column)
            if labels_width + needed > width:
                return None
            if not parts or needed > free_width:
                parts.append([*labels])
                free_width = width - labels_width
            parts[-1].append(column)
            free_width -= needed
        return parts


def show_table(console: Console, table: TextTable) -> None:
    """Print a table on a console: whole if it fits, else in parts below each other, else row by row."""
    parts = table.parts(console.width)
    if parts is None:
        _show_stacked(console, table)
        return
    for number, columns in enumerate(parts):
        if number > 0:
            console.print()
        _show_part(console, table, columns)


def _show_part(console: Console, table: TextTable, columns: Sequence[int]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP_COLUMNS - 1, 0, 0))
    for column in columns:
        is_label = column < table.num_labels
        is_number = not is_label or (table.is_grouped and column == 0)
        grid.add_column(table.headings[column], justify="right" if is_number else "left", no_wrap=True)
    previous_group: str | None = None
    for row in table.rows:
        cells = [table.cell(row, column) for column in columns]
        if table.is_grouped:
            group = cells[0]
            if previous_group is not None and group != previous_group:
                grid.add_section()
            if group == previous_group:
                cells[0] = ""
            previous_group = group
        grid.add_row(*map(Text, cells), style=row.style or None)
    console.print(grid)


def _show_stacked(console: Console, table: TextTable) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for number, row in enumerate(table.rows):
        if number > 0:
            console.print()
        title = " ".join(table.cell(row, column) for column in range(table.num_labels))
        console.print(title, style=row.style or "bold", markup=False, overflow="fold")
        for line in _stacked_lines(table, row):
            console.print(Padding(Text(line), (0, 0, 0, _GAP_COLUMNS)))


def _stacked_lines(table: TextTable, row: TableRow) -> Iterator[str]:
    for column in range(table.num_labels, len(table.headings)):
        if cell := table.cell(row, column):
            yield f"{' '.join(table.headings[column].split())}  {cell}".strip()


def show_sections(console: Console, sections: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> None:
    """Print titled lists of (name, value) on a console; a value that is too long is folded into more lines."""
    for number, (title, rows) in enumerate(sections):
        console.print("\n" * (number > 0) + title, style="bold", markup=False, overflow="fold")
        show_pairs(console, rows)


def show_pairs(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns; a value that is too long is folded into more lines."""
    from rich.cells import cell_len
    from rich.text import Text

    column = max((cell_len(name) for name, _ in rows), default=0) + _GAP_COLUMNS
    for name, value in rows:
        # Line by line: rich's tables end each line in blanks.
        lines = Text(value or " ").wrap(console, max(1, console.width - column), overflow="fold")
        for number, line in enumerate(lines):
            label = name if number == 0 else ""
            pair = Text.assemble((label, "dim"), " " * (column - cell_len(label)), line)
            pair.rstrip()
            console.print(pair, soft_wrap=True)
