"""The end of a JSON object or list that arrives in pieces."""

from __future__ import annotations

import string

_CLOSES = {"}": "{", "]": "["}
# Characters of literals, numbers and whitespace. Whether they are in the right order is checked at the end.
_OUTSIDE = frozenset(" \t\r\n:,+.-" + string.ascii_letters + string.digits)


class JsonValue:
    """Finds the end of a JSON object or list by its brackets and strings. A character that cannot follow breaks it."""

    def __init__(self) -> None:
        self.is_over = False
        self._open: list[str] = []
        self._is_in_string = self._is_escaped = False

    def add(self, text: str, begin: int) -> tuple[int, bool]:
        """Add the text from `begin` on; returns up to where it belongs to the value, and whether it breaks it there."""
        for at in range(begin, len(text)):
            if self.is_over:
                return at, False
            if not self._takes(text[at]):
                return at, True
        return len(text), False

    def _takes(self, character: str) -> bool:
        if self._is_in_string:
            is_escaped, self._is_escaped = self._is_escaped, character == "\\" and not self._is_escaped
            self._is_in_string = is_escaped or character != '"'
            return is_escaped or character >= " "
        if character in _CLOSES:
            if not self._open or self._open.pop() != _CLOSES[character]:
                return False
            self.is_over = not self._open
            return True
        if character in "{[":
            self._open.append(character)
            return True
        self._is_in_string = character == '"'
        return bool(self._open) and (self._is_in_string or character in _OUTSIDE)
