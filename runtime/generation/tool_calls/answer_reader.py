"""The reader of an answer that arrives in pieces: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from runtime.generation.tool_calls.call_format import CallFormat, ParsedCall
from runtime.generation.tool_calls.call_reader import CallReader, CutOffError
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.generation.tool_calls.incoming_text import IncomingText, MalformedError, Markers, ParsingSteps

# Texts that look like a block of calls and are none are searched for calls themselves: each of at most so many
# characters, and so many of any length. So a text of many openings that are never closed is read in linear time.
_SHORT = 4096
_MAX_LONG = 4


class AnswerReader:
    """Splits an answer that arrives in pieces into content, reasoning and calls.

    However an answer is cut into pieces, its events are the same, except for where their texts are cut. Text is
    withheld only while it may become a tag or a call. The tags of the reasoning are left out, with the whitespace
    around it.

    Reasoning begins at the beginning of an answer, or after other reasoning or a call; elsewhere its tag is a word. A
    marker of calls counts if a call follows, in the reasoning too, which it ends; else it is a word. Calls are given as
    they are written if the format writes arguments as JSON, otherwise whole at the end of their block. A malformed call
    is content. Whitespace before a call, between calls and after the last one is not content.
    """

    _num_calls = _num_long = 0  # calls, and texts above `_SHORT` that were none
    _left_out = ""  # text that belongs to no part of the answer, for the source of the next event
    _space = ""  # whitespace at the end of the text so far, which may be left out
    _may_reason = True  # whether reasoning may begin here
    _is_unclosed = False  # whether a call has ended the reasoning
    _follows_call = False  # whether only whitespace has come since a call
    _call: ToolCall | None = None  # whose arguments are given while they are written
    _index = 0  # of that call

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
        self._text = IncomingText()
        self._calls = None if format is None else CallReader(self._text, format, tools, self)
        self._tags = tags or ("", "")
        self._dropped = tuple(dropped)
        of_calls = () if format is None else (format.start, format.end)
        self.marks = [mark for mark in (*self._tags, *dropped, *of_calls) if mark]  # all that it knows
        self._is_parallel = format is None or format.is_parallel
        self._new_id = new_id or (format.new_id if format is not None else str)
        self._deltas: list[Delta] = []
        self.is_reasoning = is_thinking  # whether the text so far ends within the reasoning
        # Whether to keep leading whitespace: at the beginning of an answer, and after other text, but not after a tag.
        self._keeps_space = not is_thinking
        self._arguments: list[str] = []  # parts of its arguments
        self._given: list[str] = []  # and of the text of its events
        self._steps = self._read()

    @property
    def opening(self) -> str:
        """The text without which no reasoning begins; "" if none does."""
        return self._tags[0]

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told apart; otherwise the whole text is the answer."""
        return bool(self._tags[1])

    @property
    def is_in_block(self) -> bool:
        """Whether the text so far ends within a call, malformed or not."""
        return self._calls is not None and self._calls.is_in_call

    @property
    def ends_of_block(self) -> tuple[str, ...]:
        """See `CallReader`."""
        return () if self._calls is None else self._calls.ends_of_block

    def add(self, text: str) -> list[Delta]:
        """Take the next piece of the text; returns the events that are certain now."""
        self._text.feed(text)
        next(self._steps, None)
        return self._take_deltas()

    def finish(self, *, is_complete: bool) -> list[Delta]:
        """The last events; a block that lacks only its end counts if the model has ended the text."""
        self._text.end(is_complete=is_complete)
        next(self._steps, None)
        if self._follows_call or self.is_reasoning:
            self._leave_out_space()
        if self._space or self._left_out:
            self._give_space()
        return self._take_deltas()

    # --- the answer -------------------------------------------------------------------------------

    def _read(self) -> ParsingSteps[None]:
        opening, closing = self._tags
        marked, bare = ((), ()) if self._calls is None else (self._calls.markers, self._calls.bare_markers)
        while True:
            may_be_bare = self._may_reason and not self.is_reasoning
            may_call = self._is_parallel or not self._num_calls
            blocks = ((*marked, *bare) if may_be_bare else marked) if may_call else ()
            tags = (closing,) if self.is_reasoning else (opening, closing if self._is_unclosed else "")
            dropped = () if self.is_reasoning else self._dropped
            markers = Markers((*blocks, *dropped, *filter(None, tags)))
            marker = yield from self._text.seek(markers, self._give)
            if not marker:
                return
            if marker in dropped:
                yield from self._text.accept(marker)
                self._pass_mark(self._text.pop())
            elif marker not in tags:
                # A bare call has no text before it; the search has given such.
                if self._may_reason or marker in marked:
                    yield from self._read_block(marker)
            elif self.is_reasoning or self._may_reason:
                yield from self._text.accept(marker)
                self._pass_tag(self._text.pop(), is_opening=marker == opening and not self.is_reasoning)
            else:
                yield from self._give_word(marker)

    def _read_block(self, marker: str) -> ParsingSteps[None]:
        assert self._calls is not None
        try:
            yield from self._calls.read()
            return
        except MalformedError:
            pass
        except CutOffError as error:
            if error.call is not None or self._call is not None:
                self._cut_off(error.call)
                return
        if self._call is not None or self._calls.has_begun:
            yield from self._give_malformed()
        elif self._is_word():
            yield from self._give_word(marker)

    def _give_malformed(self) -> ParsingSteps[None]:
        """Give a malformed call as content, up to the end of its block: what looks like a call in it is none."""
        assert self._calls is not None
        if self._call is not None:
            self._deltas.append(Delta("call_broken", "".join(self._given), "", self._index))
            self._call, self._follows_call, self._may_reason = None, False, False
        # What was read twice was read to the end of the answer.
        self._num_long += self._calls.num_retried > _SHORT
        self._give(self._text.pop() if self._num_long <= _MAX_LONG else self._text.pop_rest())
        if self._calls.end:
            yield from self._give_word((yield from self._text.seek(Markers((self._calls.end,)), self._give)))

    def _is_word(self) -> bool:
        """Whether only the marker of a text that is no call is given; else the text before the cursor was given."""
        length = self._text.num_passed
        self._num_long += length > _SHORT
        if length <= _SHORT or self._num_long <= _MAX_LONG:
            self._text.back()
            return True
        self._give(self._text.pop())
        return False

    def _give_word(self, marker: str) -> ParsingSteps[None]:
        yield from self._text.accept(marker)
        self._give(self._text.pop())

    # --- content and reasoning --------------------------------------------------------------------

    def _pass_mark(self, mark: str) -> None:
        if self.is_reasoning or self._follows_call:
            self._leave_out_space()
        elif self._space:
            self._give_space()
        self._left_out += mark

    def _pass_tag(self, tag: str, *, is_opening: bool) -> None:
        self._pass_mark(tag)
        self.is_reasoning, self._may_reason = is_opening, True
        self._keeps_space = self._follows_call = self._is_unclosed = False

    def _give(self, text: str) -> None:
        if not (kept := self._stripped(text)):
            return
        self._deltas.append(Delta("reasoning" if self.is_reasoning else "content", kept, self._left_out + kept))
        self._left_out, self._follows_call = "", False
        self._may_reason &= not kept.strip()

    def _stripped(self, text: str) -> str:
        text, self._space = self._space + text, ""
        if not self._keeps_space:
            kept = text.lstrip()
            self._left_out += text[: len(text) - len(kept)]
            self._keeps_space, text = bool(kept), kept
        # Whitespace at the end may precede a tag or a call.
        kept = text.rstrip() if self.is_reasoning or self._calls is not None else text
        self._space = text[len(kept) :]
        return kept

    def _give_space(self) -> None:
        self._deltas.append(Delta("content", self._space, self._left_out + self._space))
        self._space = self._left_out = ""

    def _leave_out_space(self) -> None:
        self._left_out, self._space = self._left_out + self._space, ""

    # --- calls, as their reader gives them --------------------------------------------------------

    def begin_call(self, name: str, id: str | None) -> ToolCall:
        """The head of a call, whose arguments are given as they come."""
        if self.is_reasoning:
            self._leave_out_space()
        source, self._space = self._space + self._text.pop(), ""
        call = self._call = ToolCall(id or self._new_id(), name, "")
        self._index = self._num_calls
        self._deltas.append(Delta("call_began", "", self._left_out + source, self._index, call))
        self._arguments, self._given, self._left_out = [], [source], ""
        self._num_calls += 1
        self._is_unclosed |= self.is_reasoning
        self.is_reasoning = False
        self._keeps_space = self._may_reason = self._follows_call = True
        return call

    def add_arguments(self) -> str:
        """Further text of its arguments, which is returned."""
        assert self._call is not None
        text = self._text.pop()
        self._deltas.append(Delta("call_arguments", text, text, self._index))
        self._arguments.append(text)
        self._given.append(text)
        return text

    def end_call(self) -> None:
        """The end of that call."""
        assert self._call is not None
        call = attrs.evolve(self._call, arguments="".join(self._arguments))
        self._deltas.append(Delta("call_ended", "", self._text.pop(), self._index, call))
        self._call = None

    def give_calls(self, calls: Sequence[ParsedCall]) -> None:
        """Whole calls; the first one has the source of all."""
        for parsed in calls:
            call = self._begin_whole(parsed)
            self._deltas.append(Delta("call_ended", "", "", self._index, call))
            self._call = None

    def end_block(self) -> None:
        """The end of a block, after its last call."""
        self._left_out += self._text.pop()

    def _begin_whole(self, parsed: ParsedCall) -> ToolCall:
        call = self.begin_call(parsed.name, parsed.id)
        self._deltas.append(Delta("call_arguments", parsed.arguments, "", self._index))
        self._arguments = [parsed.arguments]
        return attrs.evolve(call, arguments=parsed.arguments)

    def _cut_off(self, parsed: ParsedCall | None) -> None:
        if parsed is not None:
            self._begin_whole(parsed)
        assert self._call is not None
        rest, partial = self._text.pop_rest(), attrs.evolve(self._call, arguments="".join(self._arguments))
        self._deltas.append(Delta("call_broken", "".join(self._given) + rest, rest, self._index, partial))
        self._call = None

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas
