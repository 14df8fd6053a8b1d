"""Tables, answers and messages fit a terminal of any width, and nothing is cut."""

import io
import pty
import re
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console
from sweeps import sweep

from runtime.terminal.display import Output, OutputError, print_message, print_sections
from runtime.terminal.tables import Table, show_sections, show_table
from runtime.terminal.word_wrap import WordWrap

TABLE = Table(
    ("streams", "", "× one\nby one", "tokens/s"),
    [("1", "outrider [at] once", "1.05", "99.1 (98–99)"), ("16", "batched", "–", "failed")],
    num_labels=2,
)


def test_a_table_that_does_not_fit_is_given_row_by_row():
    console = Console(file=io.StringIO(), width=30)
    show_table(console, TABLE)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
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


@sweep(("variable", "value"), [("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1"), ("COLUMNS", "")])
def test_nothing_is_wrapped_or_filled_up_where_no_terminal_shows_it(variable, value, monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv(variable, value)
    finding = "word " * 100 + "end"
    print_sections([("machine", [("device", finding), ("blas", "x")])])
    written = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert written == f"machine\ndevice  {finding}\nblas    x\n"


# --- words ----------------------------------------------------------------------------------------

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three faces that form one character


@sweep(
    ("text", "columns", "written"),
    [
        *(("the quick brown fox", columns, "the quick\nbrown fox") for columns in (10, 9)),
        ("the quick  brown fox", 0, "the quick  brown fox"),
        *[("a\tb c", 10, "a\tb\nc"), ("    indented word", 12, "    indented\nword")],
        ("one\n\ntwo three", 5, "one\n\ntwo\nthree"),
        # A word that is longer than a line stays whole, for the terminal to wrap.
        ("see https://example.org/a/long/way now", 12, "see\nhttps://example.org/a/long/way now"),
        # Wide characters are words, but for signs that must not begin or end a line; Hangul has blanks.
        *[("日本語の文章。", 6, "日本語\nの文\n章。"), ("가나 다라", 6, "가나\n다라")],
        *[("ab（日本）", 6, "ab（日\n本）"), ("abc（日本）", 6, "abc\n（日\n本）")],
        *[("ab 👍🏽👍🏽", 6, "ab 👍🏽\n👍🏽"), (f"abc {FAMILY}", 6, f"abc {FAMILY}"), ("ab 🇩🇪 cd", 5, "ab 🇩🇪\ncd")],
        ("cafe\u0301 ole\u0301", 8, "cafe\u0301 ole\u0301"),
        # Line breaks in code would be copied with it.
        ("```py\na = b + c + d\n```\na b c d", 5, "```py\na = b + c + d\n```\na b c\nd"),
        ("~~~\n```\na b c\n~~~\na b", 3, "~~~\n```\na b c\n~~~\na b"),
        # A model does not control the terminal.
        ("a\x1b[2Jb\r\nc\x07", 9, "a\ufffd[2Jb\nc\ufffd"),
    ],
)
def test_a_line_is_broken_between_words_however_the_text_arrives(text, columns, written):
    for size in (1, 2, 3, 100):
        wrap = WordWrap()
        pieces = [wrap.add(text[at : at + size], columns) for at in range(0, len(text), size)]
        assert "".join([*pieces, wrap.flush(columns)]) == written


def test_a_word_is_written_once_it_cannot_move_and_never_moves_then():
    wrap = WordWrap()
    pieces = ["the qu", "ick", " brown", "ish", " fox"]
    assert [wrap.add(piece, 12) for piece in pieces] == ["the", "", " quick\nbrown", "ish", ""]
    assert wrap.flush(12) == " fox"


def test_a_width_that_changes_holds_from_the_next_word_on():
    wrap = WordWrap()
    assert wrap.add("one two three ", 80) + wrap.add("four five ", 9) == "one two three\nfour five"
    assert wrap.add("six seven ", 40) == " six seven"


def test_messages_and_answers_have_the_width_that_the_terminal_has_now(monkeypatch):
    seen, given = pty.openpty()
    with open(seen, "rb", buffering=0) as screen, open(given, "w") as terminal:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, terminal)
        output = Output()
        for columns, written in (
            (20, b"outrider: a message\r\nof words\r\n"),
            (40, b"outrider: a message of words\r\n"),
        ):
            termios.tcsetwinsize(given, (24, columns))
            assert output.columns == columns
            print_message("a message of words")
            terminal.flush()
            # A terminal gives what is there, which may be a part.
            read = b""
            while len(read) < len(written):
                read += screen.read(1000)
            assert read == written
