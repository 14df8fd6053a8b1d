"""The reader of an answer that consists of several messages; see `message_format`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from runtime.generation.answers.message_format import MAX_HEADER_CHARS, MessageFormat, PartKind
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.argument_values import kind_of
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.events import Delta, DeltaKind, ToolCall
from runtime.generation.tool_calls.incoming_text import Markers

# Between two messages of one kind, which have no text between them.
_BETWEEN = "\n\n"
_SPACE_OF_JSON = " \t\r\n"


class MessageReader:
    """Splits an answer of several messages into content, reasoning and calls; as `AnswerReader` otherwise.

    Headers and markers are left out. A marker within a message is text unless another message, or nothing, follows. A
    call of an unknown function is content, with its header, and so is any call if the answer may have none.
    """

    tells_reasoning = True
    _unread = ""
    _num_begun = 0  # its first characters that are the prompt's
    _left_out = ""  # text that belongs to no part of the answer, for the source of the next event
    _is_first_piece = False  # whether nothing was given of the message
    _num_calls = _num_before_block = 0
    _call: ToolCall | None = None
    _call_source = ""
    _block: AnswerReader | None = None

    def __init__(
        self,
        messages: MessageFormat,
        begun: str = "",
        *,
        format: CallFormat | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Read one answer, of which the prompt has begun a message: its text after `messages.start`."""
        self._messages, self._format, self._tools = messages, format, tools
        self._names = {tool["function"]["name"] for tool in tools} if format is not None else set()
        self._new_id = format.new_id if format is not None else str
        self._ends = Markers(messages.ends)
        self._deltas: list[Delta] = []
        self._given: set[DeltaKind] = set()  # kinds of text that some message had
        self._read: Callable[[], bool] = self._read_header
        self._kind: PartKind = "content"  # of the message
        self.add(begun)
        self._left_out = ""
        self._given.clear()
        self._num_begun = len(self._unread)

    @property
    def marks(self) -> list[str]:
        """See `AnswerReader`."""
        return [*self._messages.marks, *([self._format.start] if self._format is not None else [])]

    @property
    def opening(self) -> str:
        """See `AnswerReader`: the end of a header."""
        return self._messages.header_end

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._read == self._read_message and self._kind == "reasoning"

    @property
    def is_in_block(self) -> bool:
        """Whether the text so far ends within a call."""
        return self._call is not None or (self._block is not None and self._block.is_in_block)

    @property
    def ends_of_block(self) -> tuple[str, ...]:
        """See `AnswerReader`."""
        return self._messages.ends if self.is_in_block else ()

    def add(self, text: str) -> list[Delta]:
        """See `AnswerReader.add`."""
        self._unread += text
        while self._read():
            pass
        return self._take_deltas()

    def finish(self, *, is_complete: bool) -> list[Delta]:
        """See `AnswerReader.finish`."""
        rest, self._unread = self._unread, ""
        if self._read == self._read_message:
            begin, end = self._ends.search(rest, 0)
            if begin == 0 and end and self._messages.may_begin_next(rest[len(end) :]):
                self._end_message(rest, is_complete=True)
            else:
                self._give(rest)
                self._end_message("", is_complete=is_complete)
        elif "<|" in rest or self._left_out:
            self._left_out += rest[self._num_begun :]
        else:
            self._give_part("content", rest[self._num_begun :])
        if self._left_out:
            self._deltas.append(Delta("content", "", self._left_out))
            self._left_out = ""
        return self._take_deltas()

    # --- each state takes text from `_unread`, and returns whether there is more to do ------------------

    def _read_header(self) -> bool:
        messages, text = self._messages, self._unread
        end = text.find(messages.header_end)
        header = None if end < 0 else messages.header(text[:end].removeprefix(messages.start))
        kind, recipient = header or (None, "")
        block = self._format.start if self._format is not None and not messages.is_harmony else ""
        words = text.lstrip()
        may_be_block = block != words and block.startswith(words)
        if end < 0 and (messages.may_be_header(text) or (may_be_block and len(text) <= MAX_HEADER_CHARS)):
            return False
        begin, self._num_begun = self._num_begun, 0
        end = 0 if kind is None else end + len(messages.header_end)
        self._read, self._is_first_piece = self._read_message, True
        if kind is None:
            # Text without a header.
            self._kind = "block" if block and words.startswith(block) else "content"
            end = begin if begin or not self._left_out else len(text) - len(text.removeprefix("assistant"))
        elif kind == "call" and recipient in self._names:
            self._begin_call(recipient, text[begin:end])
            begin = end
        elif kind == "call":
            # Of a tool that was not offered to the model, such as those that it was trained with.
            is_reasoning = "<|channel|>analysis" in text[:end]
            self._kind = "reasoning" if is_reasoning else "content"
            end = end if is_reasoning else begin
        else:
            self._kind = kind
        self._left_out += text[begin:end]
        self._unread = text[end:]
        return True

    def _read_message(self) -> bool:
        text = self._unread
        begin, end = self._ends.search(text, 0)
        while end:
            after = text[begin + len(end) :]
            if (begun := self._messages.next_begun(after)) is not None:
                end_of_source = begin + len(end) + begun
                self._give(text[:begin])
                self._unread = text[end_of_source:]
                self._end_message(text[begin:end_of_source], is_complete=True)
                return True
            if self._messages.may_begin_next(after):
                break  # the end of the answer, or a marker in a text
            begin, end = self._ends.search(text, begin + len(end))
        self._give(text[:begin])
        self._unread = text[begin:]
        return False

    # --- messages -------------------------------------------------------------------------------------

    def _end_message(self, source: str, *, is_complete: bool) -> None:
        """End a message, whose marker is in `source`."""
        if self._call is not None:
            source = self._end_call(source, is_complete=is_complete)
        if self._block is not None:
            self._take_from_block(self._block.finish(is_complete=is_complete))
            self._block = None
        self._left_out += source
        self._read = self._read_header

    def _give(self, text: str) -> None:
        match self._kind:
            case "call":
                self._give_arguments(text)
            case "block":
                self._give_block(text)
            case kind:
                self._give_part(kind, text)

    def _give_part(self, kind: Literal["content", "reasoning"], text: str) -> None:
        if not text:
            return
        if self._is_first_piece and kind in self._given:
            self._deltas.append(Delta(kind, _BETWEEN, ""))
        self._deltas.append(Delta(kind, text, self._left_out + text))
        self._left_out, self._is_first_piece = "", False
        self._given.add(kind)

    def _give_block(self, text: str) -> None:
        if self._format is None:
            self._give_part("content", text)
            return
        if self._block is None:
            self._block = AnswerReader(format=self._format, tools=self._tools)
            self._num_before_block = self._num_calls
        self._take_from_block(self._block.add(text))

    def _take_from_block(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            if delta.index is not None:
                self._num_calls = self._num_before_block + delta.index + 1
                delta = attrs.evolve(delta, index=self._num_calls - 1)
            if self._left_out:
                delta = attrs.evolve(delta, source=self._left_out + delta.source)
                self._left_out = ""
            self._deltas.append(delta)

    # --- calls that are messages ------------------------------------------------------------------------

    def _begin_call(self, name: str, header: str) -> None:
        self._call = ToolCall(self._new_id(), name, "")
        self._call_source, self._left_out = self._left_out + header, ""
        self._deltas.append(Delta("call_began", "", self._call_source, self._num_calls, self._call))
        self._kind = "call"

    def _give_arguments(self, text: str) -> None:
        assert self._call is not None
        if text:
            self._call = attrs.evolve(self._call, arguments=self._call.arguments + text)
            self._call_source += text
            self._deltas.append(Delta("call_arguments", text, text, self._num_calls))

    def _end_call(self, source: str, *, is_complete: bool) -> str:
        """End the call; returns what is left of `source`, which is its end."""
        assert self._call is not None
        call, index, self._call = self._call, self._num_calls, None
        self._num_calls += 1
        if not is_complete:
            self._deltas.append(Delta("call_broken", self._call_source, "", index, call))
            return source
        if not call.arguments.strip():
            call = attrs.evolve(call, arguments=call.arguments + "{}")
            self._deltas.append(Delta("call_arguments", "{}", "", index))
        if kind_of(call.arguments.strip(_SPACE_OF_JSON)) == "object":
            self._deltas.append(Delta("call_ended", "", source, index, call))
            return ""
        self._deltas.append(Delta("call_broken", self._call_source, "", index))
        return source

    def _take_deltas(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


Reader = AnswerReader | MessageReader
