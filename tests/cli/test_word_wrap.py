"""Word wrapping of the answers of `outrider chat`, and of messages."""

from __future__ import annotations

import pty
import sys
import termios

import pytest
from sweeps import sweep

from runtime.terminal.display import Output, print_message
from runtime.terminal.word_wrap import WordWrap

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three faces that form one character


def wrapped(text: str, columns: int, size: int = 1) -> str:
    """A text that is written in pieces of `size` characters."""
    wrap = WordWrap()
    written = [wrap.add(text[at : at + size], columns) for at in range(0, len(text), size)]
    return "".join([*written, wrap.flush(columns)])


@sweep(
    ("text", "columns", "written"),
    [
        ("the quick brown fox", 10, "the quick\nbrown fox"),
        ("the quick brown fox", 9, "the quick\nbrown fox"),
        ("the quick  brown fox", 0, "the quick  brown fox"),
        ("a\tb c", 10, "a\tb\nc"),
        ("    indented word", 12, "    indented\nword"),
        ("one\n\ntwo three", 5, "one\n\ntwo\nthree"),
        # A word that is longer than a line stays whole, for the terminal to wrap.
        ("see https://example.org/a/long/way now", 12, "see\nhttps://example.org/a/long/way now"),
        # Wide characters are words, but for signs that must not begin or end a line; Hangul has blanks.
        ("日本語の文章。", 6, "日本語\nの文\n章。"),
        ("ab（日本）", 6, "ab（日\n本）"),
        ("abc（日本）", 6, "abc\n（日\n本）"),
        ("가나 다라", 6, "가나\n다라"),
        ("ab 👍🏽👍🏽", 6, "ab 👍🏽\n👍🏽"),
        (f"abc {FAMILY}", 6, f"abc {FAMILY}"),
        ("ab 🇩🇪 cd", 5, "ab 🇩🇪\ncd"),
        ("cafe\u0301 ole\u0301", 8, "cafe\u0301 ole\u0301"),
        # Line breaks in code would be copied with it.
        ("```py\na = b + c + d\n```\na b c d", 5, "```py\na = b + c + d\n```\na b c\nd"),
        ("~~~\n```\na b c\n~~~\na b", 3, "~~~\n```\na b c\n~~~\na b"),
        # A model does not control the terminal.
        ("a\x1b[2Jb\r\nc\x07", 9, "a\ufffd[2Jb\nc\ufffd"),
    ],
)
def test_a_line_is_broken_between_words_however_the_text_arrives(text: str, columns: int, written: str) -> None:
    for size in (1, 2, 3, 100):
        assert wrapped(text, columns, size) == written


def test_a_word_is_written_once_it_cannot_move_and_never_moves_then() -> None:
    wrap = WordWrap()
    pieces = ["the qu", "ick", " brown", "ish", " fox"]
    assert [wrap.add(piece, 12) for piece in pieces] == ["the", "", " quick\nbrown", "ish", ""]
    assert wrap.flush(12) == " fox"


def test_a_width_that_changes_holds_from_the_next_word_on() -> None:
    wrap = WordWrap()
    assert wrap.add("one two three ", 80) + wrap.add("four five ", 9) == "one two three\nfour five"
    assert wrap.add("six seven ", 40) == " six seven"


def test_messages_and_answers_have_the_width_that_the_terminal_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
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
