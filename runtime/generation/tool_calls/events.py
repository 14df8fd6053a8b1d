"""The deltas of an answer that is read while it is generated: content, reasoning, and tool calls.

The `source` texts of all deltas add up to the text that was generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, cast

import attrs

from protocol.reprs import excerpt

DeltaKind = Literal["content", "reasoning", "call_began", "call_arguments", "call_ended", "call_broken"]


@attrs.frozen
class ToolCall:
    """A complete call of a function.

    Attributes:
        id: names the call in the message with its result.
        name: of the function; the model may also name one that it was not offered.
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
class Delta:
    """A piece of an answer, given while the answer is generated.

    Attributes:
        kind: "content" and "reasoning": further `text` of the answer and of its reasoning.
            "call_began": the name of a call is known; `call` has its id and name, and no arguments yet.
            "call_arguments": further `text` of a call's arguments; the texts of one call add up to a JSON object,
            unless the call breaks.
            "call_ended": `call` is complete.
            "call_broken": a call that has begun is malformed, or is cut off by the end of the answer. A consumer that
            can take a malformed call back shows `text`, what was generated of the call, as content; the rest of it
            follows as content. For a call that is cut off, `call` is the call as far as it was written, with the
            beginning of a JSON object as its arguments, and no content follows; for a malformed one it is None.
        text: see `kind`.
        source: the generated text that the delta stands for, with tags, markers and whitespace that `text` leaves out.
        index: counts the calls of the answer from 0; None for content and reasoning.
        call: see `kind`.
    """

    kind: DeltaKind
    text: str
    source: str
    index: int | None = None
    call: ToolCall | None = None


@attrs.define
class Answer:
    """An answer as far as its deltas have come.

    Attributes:
        content: with the text of malformed calls.
        calls: the complete ones.
        cut_call: the call within which the answer was cut off, if any; see `Delta.kind`.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = attrs.field(factory=list)
    cut_call: ToolCall | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The message of the chat; it has "reasoning_content" and "tool_calls" only where the answer has them."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.message_part for call in self.calls]
        return message

    def add(self, deltas: Iterable[Delta]) -> None:
        """Add the next deltas."""
        for delta in deltas:
            match delta:
                case Delta("content", text):
                    self.content += text
                case Delta("reasoning", text):
                    self.reasoning += text
                case Delta("call_ended", call=ToolCall() as call):
                    self.calls.append(call)
                case Delta("call_broken", call=ToolCall() as call):
                    self.cut_call = call
                case Delta("call_broken", text):
                    self.content += text
