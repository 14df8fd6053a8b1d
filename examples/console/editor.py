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
        whole = self.text[: self.cursor] + text + self.text[self.cursor :]
        # The inserted text may form a cluster with what follows: a letter in front of an accent.
        return Line(whole, _not_within(whole, self.cursor + len(text)))

    def backspace(self) -> Line:
        """Delete the character before the cursor."""
        return self._without(self._left(), self.cursor)

    def delete(self) -> Line:
        """Delete the character after the cursor."""
        return self._without(self.cursor, self._right())

    def left(self) -> Line:
        """Move one character back."""
        return Line(self.text, self._left())

    def right(self) -> Line:
        """Move one character forward."""
        return Line(self.text, self._right())

    def word_left(self) -> Line:
        """Move back to the beginning of a word."""
        return Line(self.text, self._word_left())

    def word_right(self) -> Line:
        """Move forward to the end of a word."""
        return Line(self.text, self._word_right())

    def home(self) -> Line:
        """Move to the beginning of the current line."""
        return Line(self.text, self._line_begin())

    def end(self) -> Line:
        """Move to the end of the current line."""
        return Line(self.text, self._line_end())

    def kill_to_end(self) -> Line:
        """Delete to the end of the current line; at its end, delete the line break."""
        end = self._line_end()
        return self._without(self.cursor, end if end > self.cursor else self._right())

    def kill_to_begin(self) -> Line:
        """Delete back to the beginning of the current line."""
        return self._without(self._line_begin(), self.cursor)

    def kill_word_left(self) -> Line:
        """Delete the word before the cursor."""
        return self._without(self._word_left(), self.cursor)

    def kill_word_right(self) -> Line:
        """Delete the word after the cursor."""
        return self._without(self.cursor, self._word_right())

    def up(self) -> Line | None:
        """Move one line up; None in the first line."""
        begin = self._line_begin()
        if begin == 0:
            return None
        above = self.text.rfind("\n", 0, begin - 1) + 1
        return Line(self.text, _not_within(self.text, min(above + self.cursor - begin, begin - 1)))

    def down(self) -> Line | None:
        """Move one line down; None in the last line."""
        end = self._line_end()
        if end == len(self.text):
            return None
        below_end = self.text.find("\n", end + 1)
        below_end = len(self.text) if below_end < 0 else below_end
        column = self.cursor - self._line_begin()
        return Line(self.text, _not_within(self.text, min(end + 1 + column, below_end)))

    def _without(self, begin: int, end: int) -> Line:
        text = self.text[:begin] + self.text[end:]
        return Line(text, _not_within(text, begin))

    def _left(self) -> int:
        return max((c.begin for c in clusters(self.text) if c.begin < self.cursor), default=0)

    def _right(self) -> int:
        return min((c.end for c in clusters(self.text) if c.end > self.cursor), default=len(self.text))

    def _word_left(self) -> int:
        before = [c for c in clusters(self.text) if c.end <= self.cursor]
        while before and not self._is_of_word(before[-1]):
            before.pop()
        while before and self._is_of_word(before[-1]):
            before.pop()
        return before[-1].end if before else 0

    def _word_right(self) -> int:
        after = [c for c in clusters(self.text) if c.begin >= self.cursor][::-1]
        while after and not self._is_of_word(after[-1]):
            after.pop()
        while after and self._is_of_word(after[-1]):
            after.pop()
        return after[-1].begin if after else len(self.text)

    def _is_of_word(self, cluster: Cluster) -> bool:
        first = self.text[cluster.begin]
        return first.isalnum() or first == "_"

    def _line_begin(self) -> int:
        return self.text.rfind("\n", 0, self.cursor) + 1

    def _line_end(self) -> int:
        end = self.text.find("\n", self.cursor)
        return len(self.text) if end < 0 else end


def _not_within(text: str, index: int) -> int:
    """The index, or the end of the cluster that it would cut."""
    return next((c.end for c in clusters(text) if c.begin < index < c.end), index)


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


_EDITS: dict[str, Callable[[Line], Line]] = {
    "newline": lambda line: line.insert("\n"),
    "tab": lambda line: line.insert(TAB),
    "backspace": Line.backspace,
    "delete": Line.delete,
    "ctrl-d": Line.delete,
    "left": Line.left,
    "ctrl-b": Line.left,
    "right": Line.right,
    "ctrl-f": Line.right,
    "ctrl-left": Line.word_left,
    "ctrl-right": Line.word_right,
    "home": Line.home,
    "ctrl-a": Line.home,
    "end": Line.end,
    "ctrl-e": Line.end,
    "ctrl-k": Line.kill_to_end,
    "ctrl-u": Line.kill_to_begin,
    "ctrl-w": Line.kill_word_left,
    "alt-d": Line.kill_word_right,
}
