"""Figures: each is declared once, and computed from the runs for JSON and for the table alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs

from runtime.terminal.tables import TableRow, TextTable


class Record(SimpleNamespace):
    """Named figures. Their names are those of the fields in JSON."""

    def as_json(self) -> dict[str, Any]:
        """The figures as a JSON object."""
        return {name: _as_json(value) for name, value in vars(self).items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, Record):
        return value.as_json()
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value


@attrs.frozen
class Figure:
    """One figure of every row.

    Attributes:
        of: computes it from whatever a row is made of; None for a figure that only the table has.
        show: its text in the table: a format of the value, such as ".1f" or "{:.1f} ms", or a function of the `Record`.
    """

    name: str = ""  # its field in JSON; "" for a figure that only the table has
    of: Callable[[Any], Any] | None = None
    heading: str | None = None  # of its column; None for a figure that only JSON has
    show: str | Callable[[Any], str] = ""

    def cell(self, row: Record) -> str:
        """The text in a row of the table; a dash for None."""
        if callable(self.show):
            return self.show(row)
        value = getattr(row, self.name)
        if value is None:
            return "–"
        return self.show.format(value) if "{" in self.show else format(value, self.show)


def record_of(figures: Iterable[Figure], source: Any) -> Record:
    """The figures of one row."""
    return Record(**{figure.name: figure.of(source) for figure in figures if figure.of is not None})


def table_of(
    figures: Iterable[Figure],
    rows: Iterable[Record],
    *,
    is_bold: Callable[[Record], bool] = lambda _: False,
    num_labels: int = 1,
    is_grouped: bool = False,
) -> TextTable:
    """A table of the figures that have a heading.

    A row whose `failure` is not None, or whose `median` is, says so after its labels.
    """
    columns = [figure for figure in figures if figure.heading is not None]

    def cells(row: Record) -> tuple[str, ...]:
        if getattr(row, "median", 0.0) is None:
            labels = [column.cell(row) for column in columns[:num_labels]]
            return (*labels, "–" if getattr(row, "failure", None) is None else "failed")
        return tuple(column.cell(row) for column in columns)

    return TextTable(
        tuple(column.heading or "" for column in columns),
        tuple(TableRow(cells(row), "bold" if is_bold(row) else "") for row in rows),
        num_labels,
        is_grouped,
    )


# --- computing ------------------------------------------------------------------------------------


@attrs.frozen
class Spread:
    """A figure that was measured several times: median, minimum and maximum; None without a value."""

    values: tuple[float, ...]
    median: float | None
    low: float | None
    high: float | None


def spread(values: Iterable[float | None]) -> Spread:
    """The spread of the values that are known."""
    known = tuple(value for value in values if value is not None)
    median = statistics.median(known) if known else None
    return Spread(known, median, min(known, default=None), max(known, default=None))


def ratio(part: float | None, whole: float | None) -> float | None:
    """Part / whole; None if either is None or `whole` is 0."""
    return part / whole if part is not None and whole else None


def total(runs: Sequence[object], *names: str) -> float | None:
    """The sum of attributes over runs; None if there are no runs or an attribute is None for one of them."""
    values = [getattr(run, name) for run in runs for name in names]
    return sum(values) if values and None not in values else None


# --- words ----------------------------------------------------------------------------------------


def seconds_text(value: float | None) -> str:
    """A time in a cell."""
    return "–" if value is None else f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def bytes_text(num_bytes: int | None) -> str:
    """A size in a cell."""
    if num_bytes is None:
        return "–"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"
