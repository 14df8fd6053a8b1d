"""Where a text ends by a stop string.

A text grows token by token, and ends with the first token after which a stop string occurs in what can be read of it.
Of several that do by then, the one that begins earliest counts; of those that begin together, the one listed first.
What is given is the text before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from attrs.validators import ge


@attrs.frozen
class Stop:
    """The end of a text by a stop string.

    Attributes:
        text: the stop string.
        num_tokens: how many of a round's tokens, >= 1, the text has to its end; what follows them falls away.
    """

    text: str
    num_tokens: int = attrs.field(validator=ge(1))


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces, and withholds what may become one.

    Attributes:
        found: the stop string that ended the text, or None so far.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """For one text.

        Args:
            stops: one at least, none of them empty.
        """
        self.found: str | None = None
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._withheld = ""

    @property
    def withheld(self) -> str:
        """The end of the text so far that may be the beginning of a stop string."""
        return self._withheld

    def add(self, piece: str, ahead: str = "") -> str:
        """What may be given once a piece has come.

        Args:
            piece: what comes next; may be empty.
            ahead: what is known to come after it and may not be given yet. The pieces that follow have it again.

        Returns: what is certain to come before any stop string; nothing more once one was found.
        """
        if self.found is not None:
            return ""
        text = self._withheld + piece
        known = text + ahead
        found = [(begin, i) for i, stop in enumerate(self._stops) if (begin := known.find(stop)) >= 0]
        if found:
            begin, first = min(found)
            self.found, self._withheld = self._stops[first], ""
            return known[:begin]
        begin = self._may_begin(text)
        self._withheld = text[begin:]
        return text[:begin]

    def finish(self, rest: str = "") -> str:
        """What is left to give, where the text is over after its rest; what was withheld, unless a stop is found."""
        given = self.add(rest)
        given, self._withheld = given + self._withheld, ""
        return given

    def _may_begin(self, text: str) -> int:
        """Where the longest suffix begins that more text could make a stop string; at the end, if there is none."""
        for begin in range(max(0, len(text) - self._longest + 1), len(text)):
            suffix = text[begin:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return begin
        return len(text)
