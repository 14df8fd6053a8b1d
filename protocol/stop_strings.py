"""Stop strings: where they end a text.

A text ends with the first token after which a stop string occurs in the decoded text. If several occur by then, the one
that begins earliest counts; of those that begin together, the one listed first. The consumer is given the text before.
In an answer with reasoning or calls, only the content is searched (`runtime.generation.text.ContentStops`).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs.validators import ge


@attrs.frozen
class Stop:
    """The end of a text, caused by a stop string; `num_tokens` of the round's tokens belong to the text, >= 1."""

    text: str
    num_tokens: int = attrs.field(validator=ge(1))


class StopMatcher:
    """Finds stop strings, none empty, in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.found: str | None = None  # the stop string that ended the text; None so far
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self.withheld = ""  # the end of the text so far, if it may be the beginning of a stop string

    def add(self, piece: str, ahead: str = "") -> str:
        """Add a piece of the text; gives what is before any stop string for certain; "" once one was found.

        `ahead` is text that later pieces will contain, but that may not be given yet.
        """
        if self.found is not None:
            return ""
        text = self.withheld + piece
        known = text + ahead
        found = [(begin, i) for i, stop in enumerate(self._stops) if (begin := known.find(stop)) >= 0]
        if found:
            begin, index = min(found)
            self.found, self.withheld = self._stops[index], ""
            return known[:begin]
        begin = self._may_begin(text)
        self.withheld = text[begin:]
        return text[:begin]

    def finish(self, rest: str = "") -> str:
        """Add the last piece of the text; gives what is left, with what was withheld unless a stop string was found."""
        given = self.add(rest)
        given, self.withheld = given + self.withheld, ""
        return given

    def _may_begin(self, text: str) -> int:
        """Where the longest suffix begins that is the beginning of a stop string; the text's length if none is."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            suffix = text[begin:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return begin
        return len(text)
