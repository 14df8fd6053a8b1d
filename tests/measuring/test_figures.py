"""Figures: what they are computed to be, and how JSON and tables have them."""

from __future__ import annotations

from types import SimpleNamespace

from sweeps import sweep

from runtime.measuring.figures import (
    Figure,
    Record,
    bytes_text,
    ratio,
    record_of,
    seconds_text,
    spread,
    table_of,
    total,
)

FIGURES = (
    Figure("name", lambda run: run.name, ""),
    Figure("median", lambda run: run.median, "tokens/s", ".1f"),
    Figure("failure", lambda run: None if run.median else "no cache"),
    Figure("share", lambda run: run.share, "share", ".0%"),
    Figure(heading="both", show=lambda row: f"{row.median:g} {row.share:g}"),
)


def test_a_figure_is_declared_once_for_json_and_the_table() -> None:
    runs = [SimpleNamespace(name="a", median=2.0, share=0.5), SimpleNamespace(name="b", median=None, share=None)]
    rows = [record_of(FIGURES, run) for run in runs]
    assert rows[0].as_json() == {"name": "a", "median": 2.0, "failure": None, "share": 0.5}
    table = table_of(FIGURES, rows, is_bold=lambda row: row.name == "a")
    assert table.headings == ("", "tokens/s", "share", "both")
    assert [row.cells for row in table.rows] == [("a", "2.0", "50%", "2 0.5"), ("b", "failed")]
    assert [row.style for row in table.rows] == ["bold", ""]


def test_a_figure_that_is_not_known_is_a_dash() -> None:
    row = Record(name="a", median=1.0, share=None)
    assert FIGURES[3].cell(row) == "–"
    assert table_of(FIGURES[:2], [Record(name="a", median=None)]).rows[0].cells == ("a", "–")


def test_records_within_records_are_objects_within_objects() -> None:
    assert Record(rows=[Record(x=1)], speeds=(1, 2)).as_json() == {"rows": [{"x": 1}], "speeds": [1, 2]}


def test_a_spread_is_of_what_is_known() -> None:
    found = spread([3.0, None, 1.0, 8.0])
    assert (found.values, found.median, found.low, found.high) == ((3.0, 1.0, 8.0), 3.0, 1.0, 8.0)
    assert (spread([]).median, spread([None]).low) == (None, None)


def test_sums_and_ratios_of_what_is_not_known_are_not_known() -> None:
    runs = [SimpleNamespace(a=1, b=2), SimpleNamespace(a=3, b=None)]
    assert (total(runs, "a"), total(runs[:1], "a", "b"), total(runs, "b"), total([], "a")) == (4, 3, None, None)
    assert (ratio(1, 2), ratio(None, 2), ratio(1, None), ratio(1, 0)) == (0.5, None, None, None)


@sweep(
    ("said", "expected"),
    [
        (seconds_text(0.25), "250 ms"),
        (seconds_text(1.5), "1.50 s"),
        (seconds_text(None), "–"),
        (bytes_text(2_000_000), "2 MB"),
        (bytes_text(1_500_000_000), "1.50 GB"),
        (bytes_text(None), "–"),
    ],
)
def test_times_and_sizes_have_a_fitting_unit(said: str, expected: str) -> None:
    assert said == expected
