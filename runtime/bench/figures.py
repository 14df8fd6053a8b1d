"""Figures of runs, how tables show them, and the report of a benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from runtime.bench.contenders import Run
from runtime.terminal.tables import Section, Table

# Figures by name, as JSON values.
TableRow = dict[str, Any]
# A heading, and the cell of a row below it.
Column = tuple[str, Callable[[TableRow], str]]


@attrs.frozen
class Report:
    """What a benchmark shows: titled lists, titled tables, and paragraphs."""

    sections: Sequence[Section]
    tables: Sequence[tuple[str, Table]]
    notes: Sequence[str]


def table(rows: Sequence[TableRow], columns: Sequence[Column], num_labels: int = 1) -> Table:
    """The table of some rows."""
    cells = [tuple(show(row) for _, show in columns) for row in rows]
    return Table([heading for heading, _ in columns], cells, num_labels)


def column(heading: str, name: str, form: str = "") -> Column:
    """The column of the figure `name`; a dash stands for None."""
    return heading, lambda row: "–" if row[name] is None else format(row[name], form)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Part / whole; None if either is None or `whole` is 0."""
    return part / whole if part is not None and whole else None


def total(runs: Iterable[Run], *names: str) -> float | None:
    """The sum of counters over runs; None if there are no runs, or a counter of one of them is not known."""
    values = [run.counts.get(name) for run in runs for name in names]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def share(runs: Collection[Run], part: str, *whole: str) -> float | None:
    """The ratio of a counter over runs to the sum of counters; None if one is not known."""
    return ratio(total(runs, part), total(runs, *whole))


def median(values: Sequence[float]) -> float | None:
    """The median; None without a value."""
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> TableRow:
    """Median, minimum and maximum, each None without a value."""
    return {"median": median(values), "low": min(values, default=None), "high": max(values, default=None)}


def spread_cell(row: TableRow) -> str:
    """Median, minimum and maximum of a row; why there are none if it has none."""
    if row["median"] is None:
        return "–" if row["failure"] is None else "failed"
    form = ".0f" if row["median"] >= 10 else ".1f"
    return f"{row['median']:.1f} ({row['low']:{form}}–{row['high']:{form}})"


def same_cell(row: TableRow) -> str:
    """How many texts of a row are the expected ones."""
    return "–" if row["same_texts"] is None else f"{row['same_texts']}/{row['num_texts']}"


def about_models(result: Mapping[str, Any], num_texts: int | str) -> Iterator[tuple[str, str]]:
    """Models, texts, repeats and machine."""
    dtypes = result["dtypes"]
    yield "target", f"{result['target']}, {', '.join(dtypes['target'])}"
    yield "draft", ", ".join([result["draft"], *dtypes.get("draft", ())])
    for name, each in dtypes.items():
        if name not in ("target", "draft"):
            yield "", f"{name}: {', '.join(each)}"
    yield "texts", f"{num_texts} of {result['max_tokens']} tokens, temperature {result['temperature']:g}"
    yield from about_run(result)


def about_run(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Repeats and machine."""
    cut = "" if result["is_complete"] else ", the last perhaps in part: it was interrupted"
    yield "repeats", f"{result['repeats_done']} of {result['repeats']}{cut}"
    yield from result["machine"].items()


def failures(result: Mapping[str, Any]) -> list[str]:
    """Which contenders cannot run, and why."""
    return [
        f"{name} cannot run: {why}"
        for name, why in dict.fromkeys((row["name"], row["failure"]) for row in result["rows"])
        if why is not None
    ]
