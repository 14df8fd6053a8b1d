"""How text takes up the cells of a terminal: what is one character to the eye, and how wide it is."""

from __future__ import annotations

import unicodedata

import attrs
from rich.cells import split_graphemes

TAB = "    "


@attrs.frozen
class Cluster:
    """What is one character to the eye: an accented letter, an emoji made of several.

    Attributes:
        begin, end: where it stands in its text.
        width: cells, 0 to 2; 0 for what is nothing by itself, such as an accent without a letter.
    """

    begin: int
    end: int
    width: int


def clusters(text: str) -> list[Cluster]:
    """The characters of a text as the eye has them; a line break is one of no width."""
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
    """A text with nothing in it that a terminal would obey: a model may write anything.

    Line breaks stay, tabs become blanks, and other control characters what stands for them ("␛").
    """
    text = text.replace("\r", "").replace("\t", TAB)
    return "".join(character if character == "\n" else _shown(character) for character in text)


def _shown(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp"):
        return character
    return chr(0x2400 + ord(character)) if character < " " else "\N{REPLACEMENT CHARACTER}"
