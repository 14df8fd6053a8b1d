"""Stop strings in the content of an answer, which is read while it is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.stop_strings import StopMatcher
from runtime.generation.answers.message_reader import Reader
from runtime.generation.tool_calls.events import Delta


class ContentStops:
    """A `StopMatcher` for an answer with reasoning or calls, in which it does not search.

    A stop string must occur in one stretch of content: neither tags nor the whitespace beside them are part of it. A
    stop string with a tag or a marker of calls in it is searched for in the whole text. Text that may become a call is
    withheld, as it is content if it becomes none.
    """

    def __init__(self, stops: Sequence[str], reader: Reader) -> None:
        """Search the answer that `reader` reads; it has read nothing yet."""
        with_marks = [stop for stop in stops if any(mark in stop for mark in reader.marks)]
        self.found: str | None = None  # the stop string that ended the text; None so far
        self._whole = StopMatcher(with_marks)
        self._stops = [stop for stop in stops if stop not in with_marks]
        self._matcher = StopMatcher(self._stops)
        self._reader = reader
        self._pending = ""  # text that was read, and not given

    @property
    def withheld(self) -> str:
        """The end of the text so far that is not given yet."""
        return self._pending + self._whole.withheld

    def add(self, piece: str, ahead: str = "") -> str:
        """See `StopMatcher.add`."""
        given = self._read(self._whole.add(piece, ahead))
        # The next text is content, whatever it is but a mark, where nothing is withheld but by the matcher.
        is_in_content = not (self._reader.is_reasoning or self._reader.is_in_block)
        if ahead and self.found is None and is_in_content and self._pending == self._matcher.withheld:
            given += self._matcher.add("", ahead)
            if self._matcher.found is not None:
                self.found, self._pending = self._matcher.found, ""
        if self._whole.found is not None:
            given, self._pending = given + self._pending, ""
            self.found = self.found or self._whole.found
        return given

    def finish(self, rest: str = "") -> str:
        """See `StopMatcher.finish`."""
        given = self.add(rest)
        given += self._read(self._whole.finish())
        if self.found is None:
            given += self._pass(self._reader.finish(is_complete=False))
        if self.found is None:
            given, self._pending = given + self._pending, ""
        return given

    def _read(self, piece: str) -> str:
        if self.found is not None:
            return ""
        self._pending += piece
        return self._pass(self._reader.add(piece))

    def _pass(self, events: Iterable[Delta]) -> str:
        """The text to give with events, up to a stop string."""
        num_given = 0
        for event in events:
            content = event.text if event.kind == "content" and event.source else ""
            if num_around := len(event.source) - len(content):
                # Another stretch of content begins.
                num_given += len(self._matcher.withheld) + num_around
                self._matcher = StopMatcher(self._stops)
            num_given += len(self._matcher.add(content))
            if self._matcher.found is not None:
                self.found, given, self._pending = self._matcher.found, self._pending[:num_given], ""
                return given
        given, self._pending = self._pending[:num_given], self._pending[num_given:]
        return given
