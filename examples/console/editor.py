"""A line editor: the typed text, the keys that edit it, and the history."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from console.cells import TAB, Cluster, clusters
from console.keys import Event, Key, Pasted, Typed

MOST_REMEMBERED = 1000


@attrs.frozen
class Line:
    """The typed text, which may have several lines, and the cursor in it.

    Attributes:
        text: without control characters other than newlines.
        cursor: an index into the text, never inside a grapheme cluster.
    """

    text: str = ""
    cursor: int = 0

    def insert(self, text: str) -> Line:
        """Insert a text at the cursor."""
        # The inserted text may form a cluster with what follows: a letter in front of an accent.
        return _at(self.text[: self.cursor] + text + self.text[self.cursor :], self.cursor + len(text))

    def up(self) -> Line | None:
        """Move one line up; None in the first line."""
        begin = _home(self)
        if begin == 0:
            return None
        above = self.text.rfind("\n", 0, begin - 1) + 1
        return _at(self.text, min(above + self.cursor - begin, begin - 1))

    def down(self) -> Line | None:
        """Move one line down; None in the last line."""
        end = _end(self)
        if end == len(self.text):
            return None
        below_end = _end(Line(self.text, end + 1))
        return _at(self.text, min(end + 1 + self.cursor - _home(self), below_end))


def _at(text: str, cursor: int) -> Line:
    """A text with the cursor at an index, or at the end of the cluster that it would cut."""
    return Line(text, next((c.end for c in clusters(text) if c.begin < cursor < c.end), cursor))


# --- where keys lead ------------------------------------------------------------------------------

Motion = Callable[[Line], int]


def _left(line: Line) -> int:
    return max((c.begin for c in clusters(line.text) if c.begin < line.cursor), default=0)


def _right(line: Line) -> int:
    return min((c.end for c in clusters(line.text) if c.end > line.cursor), default=len(line.text))


def _word_left(line: Line) -> int:
    before = [c for c in clusters(line.text) if c.end <= line.cursor]
    rest = _without_word(line.text, before)
    return rest[-1].end if rest else 0


def _word_right(line: Line) -> int:
    after = [c for c in clusters(line.text) if c.begin >= line.cursor]
    rest = _without_word(line.text, after[::-1])
    return rest[-1].begin if rest else len(line.text)


def _without_word(text: str, found: list[Cluster]) -> list[Cluster]:
    """Clusters without the last word among them, and without what comes after that word."""
    is_of_word = [text[c.begin].isalnum() or text[c.begin] == "_" for c in found]
    while is_of_word and not is_of_word[-1]:
        is_of_word.pop()
    while is_of_word and is_of_word[-1]:
        is_of_word.pop()
    return found[: len(is_of_word)]


def _home(line: Line) -> int:
    return line.text.rfind("\n", 0, line.cursor) + 1


def _end(line: Line) -> int:
    end = line.text.find("\n", line.cursor)
    return len(line.text) if end < 0 else end


def _end_or_line_break(line: Line) -> int:
    return _right(line) if _end(line) == line.cursor else _end(line)


class Editor:
    """The line editor with its history.

    Attributes:
        line: the text that is being typed.
    """

    def __init__(self) -> None:
        self.line = Line()
        self._past: list[str] = []
        self._back = 0  # position in the history, counted from its end; 0 for the new line
        self._new = Line()  # the new line, kept while the history is shown

    def press(self, event: Event) -> str | None:
        """Apply an event to the line; events without a meaning here are ignored.

        Returns: the text, if the event is Enter and the text is not blank; the line is then empty. None otherwise.
        """
        match event:
            case Typed(text):
                self.line = self.line.insert(text)
            case Pasted(text):
                self.line = self.line.insert(text.replace("\t", TAB))
            case Key("enter"):
                return self._hand_in()
            case Key("up" | "ctrl-p"):
                self.line = self.line.up() or self._from_past(self._back + 1)
            case Key("down" | "ctrl-n"):
                self.line = self.line.down() or self._from_past(self._back - 1)
            case Key(name) if name in _EDITS:
                self.line = _EDITS[name](self.line)
        return None

    def _hand_in(self) -> str | None:
        text = self.line.text
        if not text.strip():
            return None
        if self._past[-1:] != [text]:
            self._past = [*self._past, text][-MOST_REMEMBERED:]
        self.line, self._new, self._back = Line(), Line(), 0
        return text

    def _from_past(self, back: int) -> Line:
        if not 0 <= back <= len(self._past):
            return self.line
        if self._back == 0:
            self._new = self.line
        self._back = back
        return Line(self._past[-back], len(self._past[-back])) if back else self._new


def _moved(motion: Motion) -> Callable[[Line], Line]:
    return lambda line: Line(line.text, motion(line))


def _deleted(motion: Motion) -> Callable[[Line], Line]:
    """Deletes between the cursor and where a motion leads."""

    def edit(line: Line) -> Line:
        begin, end = sorted((line.cursor, motion(line)))
        return _at(line.text[:begin] + line.text[end:], begin)

    return edit


_EDITS: dict[str, Callable[[Line], Line]] = {
    "newline": lambda line: line.insert("\n"),
    "tab": lambda line: line.insert(TAB),
    **dict.fromkeys(("left", "ctrl-b"), _moved(_left)),
    **dict.fromkeys(("right", "ctrl-f"), _moved(_right)),
    "ctrl-left": _moved(_word_left),
    "ctrl-right": _moved(_word_right),
    **dict.fromkeys(("home", "ctrl-a"), _moved(_home)),
    **dict.fromkeys(("end", "ctrl-e"), _moved(_end)),
    "backspace": _deleted(_left),
    **dict.fromkeys(("delete", "ctrl-d"), _deleted(_right)),
    "ctrl-k": _deleted(_end_or_line_break),
    "ctrl-u": _deleted(_home),
    "ctrl-w": _deleted(_word_left),
    "alt-d": _deleted(_word_right),
}
