"""Where a JSON object ends in a text that arrives in pieces."""

from __future__ import annotations

import re

_CLOSES = {"}": "{", "]": "["}
# Of literals, numbers and whitespace; whether they are in the right order is the parser's to say.
_OUTSIDE = re.compile(r"[ \t\r\n:,0-9a-zA-Z+.\-]+")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]+')


class JsonObject:
    """Finds the end of a JSON object, by its brackets and strings alone.

    Attributes:
        is_broken: whether a character cannot be part of the object.
        is_over: whether the object's last brace has come.
    """

    def __init__(self) -> None:
        """An object of which nothing has come."""
        self.is_broken = self.is_over = False
        self._open: list[str] = []
        self._is_in_string = self._is_escaped = False

    def add(self, text: str) -> int:
        """Add the next piece.

        Returns: how many of its characters belong to the object: all, unless it is over or broken after them.
        """
        at = 0
        while at < len(text) and not self.is_over:
            if self._is_in_string:
                at = self._in_string(text, at)
            elif (run := _OUTSIDE.match(text, at)) is not None and self._open:
                at = run.end()
            elif self._takes(text[at]):
                at += 1
            else:
                self.is_broken = True
            if self.is_broken:
                break
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if (run := _IN_STRING.match(text, at)) is not None:
            return run.end()
        if text[at] not in '"\\':
            self.is_broken = True
            return at
        self._is_escaped = text[at] == "\\"
        self._is_in_string = self._is_escaped
        return at + 1

    def _takes(self, character: str) -> bool:
        if character in _CLOSES:
            if not self._open or self._open.pop() != _CLOSES[character]:
                return False
            self.is_over = not self._open
            return True
        if character in "{[":
            self._open.append(character)
            return len(self._open) > 1 or character == "{"
        self._is_in_string = character == '"'
        return self._is_in_string and bool(self._open)
