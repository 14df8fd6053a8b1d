"""Tables fit a terminal of any width, and no cell is cut."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from runtime.terminal.display import OutputError, print_sections
from runtime.terminal.tables import UNBOUNDED, Table, show_sections, show_table

TABLE = Table(
    ("streams", "", "× one\nby one", "tokens/s"),
    [("1", "outrider [at] once", "1.05", "99.1 (98–99)"), ("16", "batched", "–", "failed")],
    num_labels=2,
)


def printed(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show_table(console, TABLE)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_that_fits_has_its_headings_above_its_columns():
    lines = printed(60)
    assert [line.split() for line in lines[:2]] == [["×", "one"], ["streams", "by", "one", "tokens/s"]]
    assert lines[3:] == [
        "1        outrider [at] once    1.05  99.1 (98–99)",
        "16       batched                  –        failed",
    ]
    assert printed(UNBOUNDED) == lines


def test_a_table_that_does_not_fit_is_given_row_by_row():
    assert printed(30) == [
        "1 outrider [at] once",
        "  × one by one  1.05",
        "  tokens/s  99.1 (98–99)",
        "16 batched",
        "  × one by one  –",
        "  tokens/s  failed",
    ]


def test_a_finding_that_is_too_long_goes_on_below_and_loses_nothing():
    path = "/" + "x" * 150
    console = Console(file=io.StringIO(), width=60)
    show_sections(console, [("target", [("linear algebra", path), ("family [llama]", "two words")])])
    text = console.file.getvalue()
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
