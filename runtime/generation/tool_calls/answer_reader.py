"""The reader of an answer that arrives in pieces: content, reasoning and tool calls."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protocol.stop_strings import StopMatcher
from runtime.generation.tool_calls.call_format import CallFormat, checked_call
from runtime.generation.tool_calls.events import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    CallBroken,
    CallEnded,
    ReasoningPart,
    TextPart,
    ToolCall,
)

_CLOSES = {"}": "{", "]": "["}
# Characters of literals, numbers and whitespace. Only the parser checks whether they are in the right order.
_OUTSIDE = frozenset(" \t\r\n:,+.-" + string.ascii_letters + string.digits)


class JsonObject:
    """Finds the end of a JSON object by its brackets and strings alone. A character that cannot follow breaks it."""

    def __init__(self) -> None:
        self.is_broken = self.is_over = False
        self._open: list[str] = []
        self._is_in_string = self._is_escaped = False

    def add(self, text: str) -> int:
        """Add the next piece.

        Returns: how many of its characters belong to the object: all, unless it is over or broken after them.
        """
        for at, character in enumerate(text):
            if self.is_over:
                return at
            if not self._takes(character):
                self.is_broken = True
                return at
        return len(text)

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
            return len(self._open) > 1 or character == "{"
        self._is_in_string = character == '"'
        return bool(self._open) and (self._is_in_string or character in _OUTSIDE)


# Characters within which the head of a call must end, or its arguments are not given as they come.
_MAX_HEAD_CHARS = 2048


class AnswerReader:
    """Splits an answer that arrives in pieces into content, reasoning and calls.

    However an answer is cut into pieces, its events are the same, except for where their texts are cut. Text that may
    become a marker is withheld. The tags of the reasoning are left out, with the whitespace around the reasoning.

    Calls come in blocks between markers. They are given as they are written if the format allows it, otherwise whole at
    the end of their block. A malformed block is content. As in mlx-lm, a block also ends the reasoning. Whitespace
    before a call, between calls and after the last one is not content.
    """

    def __init__(
        self,
        *,
        tags: tuple[str, str] | None = None,
        is_thinking: bool = False,
        dropped: Sequence[str] = (),
        format: CallFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        new_id: Callable[[], str] | None = None,
    ) -> None:
        """Read one answer.

        Args:
            tags: of the reasoning, not empty; None if it is not told apart.
            is_thinking: whether the answer begins within the reasoning.
            dropped: markers of the answer's structure, which are left out of the content.
            format: of calls; None if they are not told apart.
            new_id: returns the id of a call to which the model gives none; random ones without it.
        """
        self._tags = tags or ("", "")
        self._dropped = tuple(dropped)
        self._format = format
        self._start, self._end = ("", "") if format is None else (format.start, format.end)  # of a block
        self._layout = None if format is None else format.layout
        self._tools = tools
        self._new_id = new_id or (format.new_id if format is not None else str)
        self._num_calls = 0
        self._events: list[AnswerEvent] = []
        self._unread = ""  # text that is part of no event yet
        self._num_searched = 0  # its first characters, in which the end of a block or call does not begin
        # Between blocks.
        self._left_out = ""  # text that belongs to no part of the answer, for the source of the next event
        self._space = ""  # whitespace at the end of the text so far, which may be left out
        # Whether to keep leading whitespace: at the beginning of an answer, and after other text, but not after a tag.
        self._keeps_space = not is_thinking
        self._follows_call = False  # whether only whitespace has come since a call
        # In a block.
        self._begin = ""  # its text before `_unread` that is part of no event yet
        self._has_calls = False
        # In a call whose arguments are given while they are written.
        self._call = CallBegan(0, "", "", "")
        self._head = self._arguments = self._given = ""  # text before its arguments, its arguments, text of its events
        self._object = JsonObject()
        self._enter(self._read_reasoning if is_thinking else self._read_content)

    @property
    def marks(self) -> list[str]:
        """The tags and markers that the reader looks for."""
        return [mark for mark in (*self._tags, *self._dropped, self._start, self._end) if mark]

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told apart; otherwise the whole text is the answer."""
        return bool(self._tags[1])

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._read == self._read_reasoning

    @property
    def is_in_block(self) -> bool:
        """Whether the text so far ends within a block of calls, malformed or not."""
        return self._read not in (self._read_content, self._read_reasoning)

    def add(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the text; returns the events that are certain now."""
        self._unread += text
        while self._read():
            pass
        return self._take_events()

    def finish(self, *, is_complete: bool) -> list[AnswerEvent]:
        """The last events; a block that lacks only its end counts if the model has ended the text."""
        rest, self._unread = self._unread, ""
        if self._read == self._read_reasoning:
            self._give_reasoning(self._withheld())
            self._leave_out_space()
        elif self._read in (self._read_content, self._read_malformed):
            self._give_content(self._withheld())
        elif self._read == self._read_head:
            self._end_block(rest, "", is_readable=is_complete or not self._end)
        elif self._read == self._read_tail and is_complete:
            self._end_call(rest, "")
            self._give_content(self._unread)
        elif is_complete:
            self._break_call()
            self._give_content(rest)
        else:
            call = ToolCall(self._call.id, self._call.name, self._arguments)
            self._events.append(CallBroken(self._call.index, self._given + rest, rest, call))
            self._follows_call = False
        self._unread = ""
        if self._follows_call:
            self._leave_out_space()
        if self._space or self._left_out:
            self._give_space()
        return self._take_events()

    # --- each state takes text from `_unread`, and returns whether there is more to do ------------------

    def _read_content(self) -> bool:
        marker = self._pass_to_marker(self._give_content)
        if marker is None:
            return False
        if marker == self._start:
            self._begin_block()
            return True
        if self._follows_call:
            self._leave_out_space()
        if self._space:
            self._give_space()
        if marker in self._dropped:
            self._left_out += marker
            self._enter(self._read_content)
            return True
        self._pass_tag(marker)
        self._enter(self._read_reasoning)
        return True

    def _read_reasoning(self) -> bool:
        marker = self._pass_to_marker(self._give_reasoning)
        if marker is None:
            return False
        self._leave_out_space()
        if marker == self._start:
            self._begin_block()
            return True
        self._pass_tag(marker)
        self._enter(self._read_content)
        return True

    def _read_head(self) -> bool:
        """A block before or between calls: up to the arguments of a call, or to the end of the block."""
        num_tried, end = self._num_searched, self._end_of_block()
        head = None
        if self._layout is not None and num_tried < _MAX_HEAD_CHARS:
            head = self._layout.head.match(self._unread[:_MAX_HEAD_CHARS])
        if head is not None and not 0 <= end < head.end():
            named = head.groupdict()
            self._unread = self._unread[head.end() :]
            self._begin_call(named["name"], named.get("id"), head.group())
            return True
        if end < 0:
            return False
        body, self._unread = self._unread[:end], self._unread[end + len(self._end) :]
        self._end_block(body, self._end, is_readable=True)
        return True

    def _read_arguments(self) -> bool:
        num_chars = self._object.add(self._unread)
        taken, self._unread = self._unread[:num_chars], self._unread[num_chars:]
        if taken:
            self._arguments += taken
            self._given += taken
            self._events.append(CallArguments(self._call.index, taken, taken))
        if self._object.is_over:
            self._enter(self._read_tail)
        elif self._object.is_broken:
            self._break_call()
        return self._object.is_over or self._object.is_broken

    def _read_tail(self) -> bool:
        assert self._layout is not None
        call_end, block_end = self._layout.end, self._end
        if call_end == "":
            self._end_call("", "")
            return True
        over = self._unread.find(block_end)
        end = over if call_end is None else self._unread.find(call_end)
        if 0 <= over < end or (end < 0 <= over):
            self._break_call()
            return True
        if end < 0:
            return False
        marker = call_end or block_end
        tail, self._unread = self._unread[:end], self._unread[end + len(marker) :]
        self._end_call(tail, marker)
        return True

    def _read_malformed(self) -> bool:
        """The rest of a block after a broken call, which is content."""
        marker = self._pass_to_marker(self._give_content)
        if marker is None:
            return False
        self._give_content(marker)
        self._enter(self._read_content)
        return True

    # --- content and reasoning --------------------------------------------------------------------

    def _end_of_block(self) -> int:
        """The index of the block's end in `_unread`, -1 if it has not come. Resumes where the last search ended."""
        if not self._end:
            self._num_searched = len(self._unread)
            return -1
        end = self._unread.find(self._end, self._num_searched)
        self._num_searched = max(0, len(self._unread) - len(self._end) + 1)
        return end

    def _enter(self, state: Callable[[], bool]) -> None:
        self._read, self._num_searched = state, 0
        opening, closing = self._tags
        sought = {
            self._read_content: (self._start, opening, *self._dropped),
            self._read_reasoning: (closing, self._start),
        }
        markers = [marker for marker in sought.get(state, (self._end,)) if marker]
        self._matcher = StopMatcher(markers) if markers else None

    def _pass_to_marker(self, give: Callable[[str], None]) -> str | None:
        """Give the text before the next marker. Returns the marker, once it has come."""
        text, self._unread = self._unread, ""
        if self._matcher is None:
            give(text)
            return None
        text = self._matcher.withheld + text
        passed = self._matcher.add(text[len(self._matcher.withheld) :])
        give(passed)
        if (found := self._matcher.found) is not None:
            self._unread = text[len(passed) + len(found) :]
        return found

    def _withheld(self) -> str:
        return "" if self._matcher is None else self._matcher.finish()

    def _pass_tag(self, tag: str) -> None:
        self._left_out += tag
        self._keeps_space = self._follows_call = False

    def _give_content(self, text: str) -> None:
        # Whitespace at its end may precede a call.
        if kept := self._stripped(text, holds_end=self._format is not None):
            self._events.append(TextPart(kept, self._left_out + kept))
            self._left_out, self._follows_call = "", False

    def _give_reasoning(self, text: str) -> None:
        if kept := self._stripped(text, holds_end=True):
            self._events.append(ReasoningPart(kept, self._left_out + kept))
            self._left_out = ""

    def _stripped(self, text: str, *, holds_end: bool) -> str:
        text, self._space = self._space + text, ""
        if not self._keeps_space:
            kept = text.lstrip()
            self._left_out += text[: len(text) - len(kept)]
            self._keeps_space, text = bool(kept), kept
        kept = text.rstrip() if holds_end else text
        self._space = text[len(kept) :]
        return kept

    def _give_space(self) -> None:
        self._events.append(TextPart(self._space, self._left_out + self._space))
        self._space = self._left_out = ""

    def _leave_out_space(self) -> None:
        self._left_out, self._space = self._left_out + self._space, ""

    # --- blocks and calls -------------------------------------------------------------------------

    def _begin_block(self) -> None:
        self._begin, self._space = self._space + self._start, ""
        self._has_calls, self._keeps_space = False, True
        self._enter(self._read_head)

    def _begin_call(self, name: str, id: str | None, head: str) -> None:
        self._head, self._arguments, self._object = head, "", JsonObject()
        self._given, self._begin = self._begin + head, ""
        self._call = CallBegan(self._num_calls, id or self._new_id(), name, self._left_out + self._given)
        self._left_out = ""
        self._events.append(self._call)
        self._num_calls += 1
        self._enter(self._read_arguments)

    def _end_call(self, tail: str, marker: str) -> None:
        """End a call whose arguments were given, if the parser reads the same call."""
        assert self._format is not None
        assert self._layout is not None
        call_end = self._layout.end
        parsed = self._format.parse(self._head + self._arguments + tail + (call_end or ""), self._tools) or []
        given = checked_call({"name": self._call.name, "arguments": self._arguments}, ())
        if given is None or [(each.name, each.arguments) for each in parsed] != [(given.name, given.arguments)]:
            self._unread = tail + marker + self._unread
            self._break_call()
            return
        call = ToolCall(self._call.id, self._call.name, self._arguments)
        self._events.append(CallEnded(self._call.index, call, tail + marker))
        self._has_calls = self._follows_call = True
        self._enter(self._read_content if call_end is None else self._read_head)

    def _break_call(self) -> None:
        """Give up a call that has begun; the rest of its block is content."""
        self._events.append(CallBroken(self._call.index, self._given))
        self._follows_call = False
        self._enter(self._read_malformed if self._end else self._read_content)

    def _end_block(self, body: str, end: str, *, is_readable: bool) -> None:
        """End a block whose `body` was not given yet, as whole calls, or as content if it is malformed."""
        assert self._format is not None
        source = self._begin + body + end
        calls = self._format.parse(body, self._tools) if is_readable and body.strip() else None
        if calls is None and self._has_calls and not body.strip():
            self._left_out += source
        elif calls is None:
            self._give_content(source)
        else:
            source, self._left_out = self._left_out + source, ""
        for parsed in calls or ():
            call = ToolCall(parsed.id or self._new_id(), parsed.name, parsed.arguments)
            # The first call has the source of all.
            self._events.append(CallBegan(self._num_calls, call.id, call.name, source))
            self._events.append(CallArguments(self._num_calls, call.arguments, ""))
            self._events.append(CallEnded(self._num_calls, call, ""))
            self._num_calls += 1
            self._follows_call, source = True, ""
        self._enter(self._read_content)

    def _take_events(self) -> list[AnswerEvent]:
        events, self._events = self._events, []
        return events
