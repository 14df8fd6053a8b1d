"""The events of an answer that is read while it is generated: content, reasoning, and tool calls.

The `source` texts of all events add up to the text that was generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

import attrs

from protocol.reprs import excerpt


@attrs.frozen
class ToolCall:
    """A complete call of a function.

    Attributes:
        id: names the call in the message with its result.
        name: of the function; the model may also name one that it was not told of.
        arguments: a JSON object, as text.
    """

    id: str
    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by name."""
        return cast(dict[str, Any], json.loads(self.arguments))

    @property
    def message_part(self) -> dict[str, Any]:
        """An entry of a message's "tool_calls", in OpenAI's form."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def __repr__(self) -> str:
        return f"ToolCall(id={self.id!r}, name={excerpt(self.name)}, arguments={excerpt(self.arguments, 60)})"


@attrs.frozen
class TextPart:
    """Text of the answer; `source` also has whitespace around calls, which is not part of the answer."""

    text: str
    source: str


@attrs.frozen
class ReasoningPart:
    """Text of the reasoning; `source` also has the tags, and the whitespace beside them."""

    text: str
    source: str


@attrs.frozen
class CallBegan:
    """A call whose name is known; `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str
    source: str


@attrs.frozen
class CallArguments:
    """Further text of a call's arguments; the texts of one call add up to a JSON object, unless the call breaks."""

    index: int
    text: str
    source: str


@attrs.frozen
class CallEnded:
    """The end of a call."""

    index: int
    call: ToolCall
    source: str


@attrs.frozen
class CallBroken:
    """A call that has begun and turns out malformed, or is cut off by the end of the answer.

    A consumer that can take a malformed call back shows `given` as content; the rest of it follows as content.

    Attributes:
        given: the text of the call's events, this one included.
        cut_off: if the answer ended within the call: the call as far as it was written, with the beginning of a JSON
            object as its arguments; no content follows. None for a malformed call.
    """

    index: int
    given: str
    source: str = ""
    cut_off: ToolCall | None = None


AnswerEvent = TextPart | ReasoningPart | CallBegan | CallArguments | CallEnded | CallBroken


@attrs.define
class Answer:
    """An answer as far as its events have come.

    Attributes:
        content: with the text of malformed calls.
        calls: the complete ones.
        cut_call: the call within which the answer was cut off, if any; see `CallBroken.cut_off`.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = attrs.field(factory=list)
    cut_call: ToolCall | None = None

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Add the next events."""
        for event in events:
            match event:
                case TextPart(text):
                    self.content += text
                case ReasoningPart(text):
                    self.reasoning += text
                case CallEnded(call=call):
                    self.calls.append(call)
                case CallBroken(cut_off=ToolCall() as call):
                    self.cut_call = call
                case CallBroken(given=given):
                    self.content += given
