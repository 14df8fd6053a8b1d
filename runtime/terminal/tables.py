"""Tables and titled lists for a terminal of any width: no cell is cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import Console

# Blanks between two columns.
_GAP_COLUMNS = 2

# A width beyond any table or line, for output that no terminal shows: nothing is split or wrapped there.
UNBOUNDED = 100_000

# A title, and rows of (name, value).
Section = tuple[str, Sequence[tuple[str, str]]]


@attrs.frozen
class Table:
    """A table: headings of one or more lines, and rows of as many cells; the first `num_labels` columns name a row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_labels: int = 1


def show_table(console: Console, table: Table) -> None:
    """Print a table on a console; one that is wider than the console row by row."""
    from rich.box import SIMPLE_HEAD
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP_COLUMNS - 1, 0, 0))
    for place, heading in enumerate(table.headings):
        grid.add_column(heading, justify="left" if place < table.num_labels else "right", no_wrap=True)
    for row in table.rows:
        grid.add_row(*map(Text, row))
    if console.measure(grid, options=console.options.update(width=UNBOUNDED)).maximum <= console.width:
        console.print(grid)
        return
    for row in table.rows:
        console.print(" ".join(row[: table.num_labels]), style="bold", markup=False, overflow="fold")
        for heading, cell in zip(table.headings[table.num_labels :], row[table.num_labels :], strict=True):
            line = f"{' '.join(heading.split())}  {cell}".strip()
            console.print(Padding(Text(line), (0, 0, 0, _GAP_COLUMNS)))


def show_sections(console: Console, sections: Sequence[Section]) -> None:
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
