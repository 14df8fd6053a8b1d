"""Word wrapping of a text that arrives in pieces."""

from __future__ import annotations

from unicodedata import category, east_asian_width

# Unicode categories of the characters that a line must not begin with, and of those that it must not end with.
_NOT_FIRST = frozenset(("Cf", "Lm", "Mc", "Me", "Mn", "Pe", "Pf", "Po", "Sk"))
_NOT_LAST = frozenset(("Cf", "Pi", "Ps"))
_FENCES = ("```", "~~~")


class WordWrap:
    """Breaks the lines of a text between words, at a width that may change meanwhile.

    A word is held back while it may still have to move to the next line, so nothing that was written moves. Wide
    characters are words of their own, except Hangul, which is written with blanks. A word longer than a line and fenced
    code are written as they are, for the terminal to wrap: inserted line breaks would be copied with them. Control
    characters are replaced, so that a model cannot control the terminal.
    """

    def __init__(self) -> None:
        self._column = 0  # of the cursor
        self._gap = ""  # blanks after it, which are dropped if the line is broken there
        self._word = ""  # what is held back
        self._is_open = False  # the beginning of the current word is written, so the rest follows at once
        self._line_start = ""
        self._fence = ""  # the mark that opened the code block which is being written

    def add(self, text: str, columns: int) -> str:
        """What is to be written once `text` has arrived. `columns`: width of the terminal; 0 for no bound."""
        return "".join(self._take(character, columns) for character in text)

    def flush(self, columns: int) -> str:
        """What is held back: at the end of the text, or where its style changes."""
        word, gap = self._word, self._gap
        if not word:
            return ""
        self._word = self._gap = ""
        self._is_open = True
        if columns and self._column > 0 and self._column + self._width(gap + word) > columns:
            self._column, gap = 0, "\n"
        self._advance(word if gap == "\n" else gap + word, columns)
        return gap + word

    def _take(self, character: str, columns: int) -> str:
        if character == "\n":
            written = self.flush(columns) + "\n"
            mark = self._line_start.strip(" ")[:3]
            if mark in _FENCES and self._fence in ("", mark):
                self._fence = "" if self._fence else mark
            self._column, self._gap, self._line_start, self._is_open = 0, "", "", bool(self._fence)
            return written
        if character == "\r":
            return ""
        if len(self._line_start) < 6:
            self._line_start += character
        if character in " \t" and not self._fence:
            written = self.flush(columns)
            self._gap += character
            self._is_open = False
            return written
        if category(character) == "Cc" and character != "\t":
            character = "\N{REPLACEMENT CHARACTER}"
        if self._is_open and not self._word and (self._fence or not _is_wide(character)):
            self._advance(character, columns)
            return character
        written = self.flush(columns) if self._word and _can_break(self._word[-1], character) else ""
        self._word += character
        # Where the word will stand is known if it does not fit or begins a line.
        fits = not columns or self._column + self._width(self._gap + self._word) <= columns
        return written if fits and self._column else written + self.flush(columns)

    def _advance(self, text: str, columns: int) -> None:
        self._column += self._width(text)
        if columns and self._column > columns:  # the terminal has wrapped it
            self._column = (self._column - 1) % columns + 1

    def _width(self, text: str) -> int:
        from rich.cells import cell_len

        return cell_len((" " * self._column + text).expandtabs()) - self._column


def _can_break(before: str, after: str) -> bool:
    """Whether a line may be broken between two characters that no blank separates."""
    if category(before) in _NOT_LAST or category(after) in _NOT_FIRST:
        return False
    return _is_wide(before) or _is_wide(after)


def _is_wide(character: str) -> bool:
    return (
        east_asian_width(character) in "WF"
        and not "\u1100" <= character <= "\u11ff"
        and not ("\uac00" <= character <= "\ud7a3")
    )
