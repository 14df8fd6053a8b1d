"""Grapheme clusters of a text, and their width in terminal cells."""

from __future__ import annotations

import unicodedata

import attrs
from rich.cells import split_graphemes

TAB = "    "


@attrs.frozen
class Cluster:
    """A grapheme cluster: what looks like one character, such as an accented letter or an emoji made of several.

    Attributes:
        begin, end: its range in the text.
        width: cells, 0 to 2; 0 for a cluster that shows nothing by itself, such as an accent without a letter.
    """

    begin: int
    end: int
    width: int


def clusters(text: str) -> list[Cluster]:
    """The grapheme clusters of a text; a line break is a cluster of width 0."""
    found = []
    begin = 0
    for line in text.split("\n"):
        spans, _ = split_graphemes(line)
        found += [Cluster(begin + first, begin + end, width) for first, end, width in spans]
        begin += len(line) + 1
        if begin <= len(text):
            found.append(Cluster(begin - 1, begin, 0))
    return found


def harmless(text: str) -> str:
    """A text without control sequences, which a model may write and a terminal would obey.

    Line breaks stay, tabs become blanks, and other control characters become their symbols ("␛").
    """
    text = text.replace("\r", "").replace("\t", TAB)
    return "".join(character if character == "\n" else _shown(character) for character in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp"):
        return character
    return chr(0x2400 + ord(character)) if character < " " else "\N{REPLACEMENT CHARACTER}"
