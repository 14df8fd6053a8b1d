"""Tables fit a terminal of any width: they are split or stacked, and no cell is cut."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweeps import sweep

from runtime.bench.many_streams import ManyStreams, StreamsPlan
from runtime.bench.one_stream import OneStream, OneStreamPlan
from runtime.measuring.figures import Record
from runtime.terminal.display import OutputError, print_sections
from runtime.terminal.tables import UNBOUNDED, TableRow, TextTable, show_sections, show_table

MEASURED: dict[str, Any] = {
    "target": "demo",
    "draft": "draft",
    "dtypes": {"target": ["float32"]},
    "num_prompts": 5,
    "num_ranks": 1,
    "categories": (),
    "best_speculative": None,
    "machine": {},
    "max_tokens": 192,
    "temperature": 0.0,
    "repeats": 3,
    "repeats_done": 3,
    "is_complete": True,
    "clock": None,
}


def bench_row(name: str, speed: float, **changes: Any) -> Record:
    figures: dict[str, Any] = {
        "name": name, "engine": "outrider", "draft": "draft", "lookahead": "auto", "speeds": (speed,),
        "median": speed, "low": speed - 11.1, "high": speed + 22.2, "vs_plain": speed / 50, "vs_best_speculative": 1.5,
        "acceptance": 0.76, "model_acceptance": 0.8, "copy_acceptance": None, "fresh_acceptance": 0.8,
        "stale_acceptance": None,
        "tokens_per_round": 3.21, "hit_rate": 0.45, "target_busy": 0.98, "draft_busy": 1.0,
        "limit": 300.0, "of_limit": 0.93, "same_texts": 117, "num_texts": 120, "estimates": None, "failure": None,
    }  # fmt: skip
    return Record(**figures | changes)


def streams_row(name: str, streams: int, speed: float) -> Record:
    return Record(
        name=name, kind="at once", lookahead="auto", streams=streams, speeds=(speed,),
        median=speed, low=speed - 11.1, high=speed + 22.2, vs_one_after_another=1.36, vs_in_turns=1.21,
        vs_batched=0.52, rows_per_pass=7.63, peak_bytes=1_234_000_000,
        target_busy=1.0, draft_busy=0.38, tokens_per_round=2.5, proposal=2.84, acceptance=0.61, hit_rate=0.07,
        drafted_per_token=1.93, first_token=0.123, longest_wait=12.34, same_texts=64, num_texts=64, failure=None,
    )  # fmt: skip


def test_the_prices_of_a_benchmark_are_times(capsys):
    table = ((1, 0.0216), (2, 0.0267))
    row = bench_row("outrider", 1.0, estimates={"verify_seconds": 0.0216, "acceptance": 0.8, "verify_table": table})
    OneStream(OneStreamPlan()).report(Record(**MEASURED, rows=[row])).print()
    assert capsys.readouterr().out.endswith(
        "measured by outrider\n"
        "verify        21.60 ms\n"
        "acceptance    0.8\n"
        "verify table  21.60 ms for 1, 26.70 ms for 2\n"
    )


SHEETS = {
    "bench": OneStream(OneStreamPlan())
    .report(
        Record(
            **MEASURED,
            rows=(
                bench_row("mlx-lm plain", 1234.5, acceptance=None),
                *(bench_row(f"mlx-lm speculative {k}", 100.0 + k) for k in (1, 2, 8)),
                bench_row("mlx-lm speculative 64", 0.0, median=None, failure="no cache to trim"),
                bench_row("outrider lookahead auto", 2001.7),
            ),
        )
    )
    .table,
    "bench --streams": ManyStreams(StreamsPlan())
    .report(
        Record(
            **MEASURED,
            rows=tuple(
                streams_row(name, streams, 100.0 * streams + place)
                for streams in (1, 16)
                for place, name in enumerate(
                    ("outrider one after another", "outrider in turns", "outrider at once", "mlx-lm BatchGenerator")
                )
            ),
        )
    )
    .table,
}


def printed(width: int, sheet: TextTable) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show_table(console, sheet)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@sweep("width", [40, 60, 80, 100, 120, 200])
@sweep("name", SHEETS)
def test_every_heading_and_every_number_survives_whatever_the_width(name, width):
    sheet = SHEETS[name]
    lines = printed(width, sheet)
    words = " ".join(lines).split()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    for text in (*sheet.headings[sheet.num_labels :], *(cell for row in sheet.rows for cell in row.cells)):
        assert set(text.split()) <= set(words), text
    # Each number is there as often as it occurs in the rows.
    for cell in {cell for row in sheet.rows for cell in row.cells[sheet.num_labels :] if cell and " " not in cell}:
        assert words.count(cell) >= sum(row.cells.count(cell) for row in sheet.rows)


@sweep("width", [60, 80, 100, 120])
@sweep("name", SHEETS)
def test_each_part_says_in_front_whose_its_numbers_are(name, width):
    sheet = SHEETS[name]
    parts = sheet.parts(width)
    assert parts is not None
    lines = printed(width, sheet)
    for row in sheet.rows:
        label = row.cells[sheet.num_labels - 1]
        alike = sum(other.cells[sheet.num_labels - 1] == label for other in sheet.rows)
        assert sum(f"{label} " in f"{line} " for line in lines) >= len(parts) * alike


def test_a_table_that_does_not_fit_goes_on_below():
    sheet = TextTable(("", "one", "two", "three"), (TableRow(("a", "11", "22", "33")), TableRow(("bb", "failed"))))
    lines = [line.rstrip() for line in printed(16, sheet) if "─" not in line]
    assert lines == [
        "       one  two",
        "a       11   22",
        "bb  failed",
        "",
        "    three",
        "a      33",
        "bb",
    ]
    assert sheet.parts(UNBOUNDED) == [[0, 1, 2, 3]]
    assert len(printed(UNBOUNDED, sheet)) == 4


def test_a_table_too_wide_for_any_column_is_given_by_rows():
    sheet = TextTable(("", "a\nround", "limit"), (TableRow(("outrider lookahead auto", "2.50", "1.07")),))
    assert [line.rstrip() for line in printed(26, sheet)] == [
        "outrider lookahead auto",
        "  a round  2.50",
        "  limit  1.07",
    ]


def test_a_group_is_named_once_and_set_apart():
    sheet = TextTable(("n", "way", "x"), tuple(TableRow((n, way, "1")) for n in ("1", "16") for way in "ab"), 2, True)
    lines = printed(80, sheet)
    assert [line.split() for line in lines if "─" not in line] == [
        ["n", "way", "x"],
        ["1", "a", "1"],
        ["b", "1"],
        *([[]] if not lines[4].strip() else []),
        ["16", "a", "1"],
        ["b", "1"],
    ]


def test_a_finding_that_is_too_long_goes_on_below_and_loses_nothing():
    path = "/" + "x" * 150
    console = Console(file=io.StringIO(), width=60)
    show_sections(console, [("target", [("linear algebra", path), ("family [llama]", "two words")])])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "".join(text.split()).count("x") == 150
    assert "…" not in text
    assert "family [llama]  two words" in text
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_sections_that_cannot_be_written_are_an_error_of_the_programs_own(monkeypatch):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OutputError, match="cannot write to stdout: No space left on device"):
            print_sections([("machine", [("device", "cpu")])])


def test_nothing_is_wrapped_or_filled_up_where_no_terminal_shows_it(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    finding = "word " * 100 + "end"
    print_sections([("machine", [("device", finding), ("blas", "x")])])
    assert capsys.readouterr().out == f"machine\ndevice  {finding}\nblas    x\n"


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_colour_off_a_terminal_wraps_nothing(monkeypatch, capsys, variable):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv(variable, "1")
    print_sections([("machine", [("device", "word " * 100 + "end")])])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_an_empty_width_in_the_environment_is_no_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "")
    print_sections([("machine", [("device", "word " * 100 + "end")])])
    assert len(capsys.readouterr().out.splitlines()) == 2
