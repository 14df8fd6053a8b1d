"""Text that arrives in pieces, read by generators that yield while they need more of it.

A reader looks ahead with the cursor `at`, and then takes the text before it (`take`, `pop`), or goes back (`back`). The
time is linear in the length of the text, in pieces of any size, as long as readers take what they have passed.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

import attrs

T = TypeVar("T")
ParsingSteps = Generator[None, None, T]
"""Steps of a reader, which needs more text, or the end of the text, after each; then its result."""

_CLOSES = {"}": "{", "]": "["}
# Characters of literals, numbers and whitespace in JSON. Whether they are in the right order is checked at the end.
_OUTSIDE = frozenset(" \t\r\n:,+.-" + string.ascii_letters + string.digits)

# Most white space that may stand between two parts of a call.
_MAX_SPACE = 128


class MalformedError(Exception):
    """The text is not what a reader reads."""


@attrs.frozen
class Markers:
    """Texts to be found, none empty."""

    texts: tuple[str, ...]
    _pattern: re.Pattern[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, self.texts)) or "(?!)"))

    def search(self, text: str, begin: int) -> tuple[int, str]:
        """Where the first marker begins, and the marker. Without one: where the end may be the beginning of one."""
        if (found := self._pattern.search(text, begin)) is not None:
            return found.start(), found.group()
        longest = max(map(len, self.texts), default=1)
        for at in range(max(begin, len(text) - longest + 1), len(text)):
            if any(marker.startswith(text[at:]) for marker in self.texts):
                return at, ""
        return len(text), ""


_PARTS_OF_STRINGS = {quotation: Markers((quotation, "\\")) for quotation in ('"', "'", '"""', "'''")}


@attrs.define
class _JsonValue:
    """Finds the end of a JSON object or list by its brackets and strings. A character that cannot follow breaks it."""

    is_over: bool = False
    _open: list[str] = attrs.field(factory=list)
    _is_in_string: bool = False
    _is_escaped: bool = False

    def takes(self, character: str) -> bool:
        """Add the next character; False if it cannot follow."""
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


@attrs.define
class IncomingText:
    """The text of an answer."""

    at: int = 0  # the cursor in the text that was not taken
    is_over: bool = False  # no more text comes
    is_complete: bool = False  # the model has ended the text
    has_run_out: bool = False  # a reader has met the end of the text where more could have followed
    _window: str = ""
    _begin: int = 0  # of the text in the window that was not taken
    _taken: list[str] = attrs.field(factory=list)

    def feed(self, piece: str) -> None:
        """Add the next piece."""
        self._window = self._window[self._begin :] + piece
        self.at -= self._begin
        self._begin = 0

    def end(self, *, is_complete: bool) -> None:
        """Add no more pieces."""
        self.is_over, self.is_complete = True, is_complete

    # --- what was passed --------------------------------------------------------------------------

    def take(self) -> int:
        """Take the text before the cursor, which can still be given back; returns a place for `back` and `since`."""
        if self.at > self._begin:
            self._taken.append(self._window[self._begin : self.at])
            self._begin = self.at
        return len(self._taken)

    def since(self, place: int, end: int) -> str:
        """The text between two places."""
        return "".join(self._taken[place:end])

    def back(self, place: int = 0) -> None:
        """Go back to a place, or to the end of what was popped."""
        if place < len(self._taken):
            self._window = "".join(self._taken[place:]) + self._window[self._begin :]
            del self._taken[place:]
            self._begin = 0
        self.at = self._begin

    @property
    def num_passed(self) -> int:
        """The characters before the cursor that were not popped."""
        return sum(map(len, self._taken)) + self.at - self._begin

    def pop(self) -> str:
        """Take the text before the cursor for good."""
        self.take()
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def pop_rest(self) -> str:
        """Take all text for good."""
        self.at = len(self._window)
        return self.pop()

    # --- readers ----------------------------------------------------------------------------------

    def more(self) -> ParsingSteps[bool]:
        """Wait until there is text at the cursor; False if it is over."""
        while self.at >= len(self._window):
            if self.is_over:
                self.has_run_out = True
                return False
            yield
        return True

    def peek(self) -> ParsingSteps[str]:
        """The next character; "" at the end."""
        return self._window[self.at] if (yield from self.more()) else ""

    def accept(self, text: str) -> ParsingSteps[bool]:
        """Pass a text if it comes next."""
        while True:
            ahead = self._window[self.at : self.at + len(text)]
            if ahead == text:
                self.at += len(text)
                return True
            if not text.startswith(ahead):
                return False
            if self.is_over:
                self.has_run_out = True
                return False
            yield

    def expect(self, text: str) -> ParsingSteps[None]:
        """Pass a text. Raises: MalformedError: it does not come next."""
        if not (yield from self.accept(text)):
            raise MalformedError

    def follows(self, steps: ParsingSteps[T]) -> ParsingSteps[T]:
        """What some steps find behind the cursor, which stays where it is."""
        place = self.take()
        found = yield from steps
        self.back(place)
        return found

    def space(self) -> ParsingSteps[None]:
        """Pass white space."""
        end = self.at + _MAX_SPACE
        while self.at < end and (yield from self.more()) and self._window[self.at].isspace():
            self.at += 1

    def run(self, stops: str, max_chars: int) -> ParsingSteps[str]:
        """Pass and return the characters up to one of `stops`; "" if none comes within `max_chars`."""
        length = 0
        while (yield from self.more()):
            while self.at + length < len(self._window):
                if self._window[self.at + length] in stops:
                    text = self._window[self.at : self.at + length]
                    self.at += length
                    return text
                length += 1
                if length > max_chars:
                    return ""
            if self.is_over:
                self.has_run_out = True
                return ""
            yield
        return ""

    def matching(self, characters: Collection[str]) -> ParsingSteps[str]:
        """Take and return the characters that are among these, before any other one, or the end of the text."""
        place = self.take()
        while (yield from self.more()):
            end = next((i for i in range(self.at, len(self._window)) if self._window[i] not in characters), None)
            self.at = len(self._window) if end is None else end
            if end is not None:
                break
            self.take()
        return self.since(place, self.take())

    def string(self, quotation: str) -> ParsingSteps[str]:
        """Pass a string with escapes up to its end, behind its first quotation mark; returns what is between the two.

        Raises: MalformedError: it does not end.
        """
        begin = self.take()
        while found := (yield from self.seek(_PARTS_OF_STRINGS[quotation])):
            end = self.take()
            self.at += len(found)
            if found == quotation:
                return self.since(begin, end)
            # The next character is escaped.
            if (yield from self.more()):
                self.at += 1
        raise MalformedError

    def json(self, give: Callable[[], object] | None = None) -> ParsingSteps[bool]:
        """Take a JSON object or list, or what is left of one at the end of the text; returns whether it is whole.

        Calls `give` after each part of it. Raises: MalformedError: a character cannot follow.
        """
        value, is_broken = _JsonValue(), False
        while not value.is_over and not is_broken and (yield from self.more()):
            begin = self.at
            while not value.is_over and not is_broken and self.at < len(self._window):
                is_broken = not value.takes(self._window[self.at])
                self.at += not is_broken
            if give is not None and self.at > begin:
                give()
            else:
                self.take()
        if is_broken:
            raise MalformedError
        return value.is_over

    def seek(self, markers: Markers, give: Callable[[str], None] | None = None) -> ParsingSteps[str]:
        """Take the text up to the next marker, and return the marker, which is not passed; "" at the end of the text.

        The text is given as it comes, if it is to be given.
        """
        while True:
            self.at, found = markers.search(self._window, self.at)
            if self.is_over and not found:
                self.at = len(self._window)
            if give is None:
                self.take()
            else:
                give(self.pop())
            if found or self.is_over:
                self.has_run_out |= not found
                return found
            yield
