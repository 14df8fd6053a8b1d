"""Items of an input, and the messages of a chat that they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from runtime.server.answers.body import Body, SentBack


class TextContent(Body):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: SentBack = None
    logprobs: SentBack = None


class RefusalContent(Body):
    """A refusal, in an earlier answer of another model."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


MessageContent = Annotated[TextContent | RefusalContent, Field(discriminator="type")]
_Contents = Annotated[list[MessageContent], Field(max_length=1000, fail_fast=True)]


class SentBackItem(Body):
    """An item of a response, if a client sends it back."""

    id: SentBack = None
    status: SentBack = None


class MessageItem(SentBackItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Contents


class ReasoningText(Body):
    """Text of a reasoning."""

    type: SentBack = None
    text: str


class ReasoningItem(SentBackItem):
    """The reasoning before an earlier answer; what is encrypted or a summary is left out."""

    type: Literal["reasoning"]
    summary: SentBack = None
    encrypted_content: SentBack = None
    content: Annotated[list[ReasoningText], Field(max_length=1000, fail_fast=True)] | None = None


class FunctionCallItem(SentBackItem):
    """A call of a function, in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(SentBackItem):
    """What a called function has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Contents


class ItemReference(Body):
    """An item of the output of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: str


def _type(item: Any) -> str | None:
    """The type of an item; clients leave that of a message out."""
    if isinstance(item, dict):
        type = item.get("type", "message")
        return type if isinstance(type, str) else None
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type),
]

ITEM: TypeAdapter[Any] = TypeAdapter(Item)

TAGS = frozenset(
    (
        *("message", "reasoning", "function_call", "function_call_output", "item_reference"),
        *("input_text", "output_text", "text", "refusal"),
    )
)


def messages_of(items: Iterable[Any]) -> list[dict[str, Any]]:
    """The messages of a chat that items stand for, without references.

    Reasoning, text and calls of one answer are items of their own, and one message of a chat.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the answer that goes on, if the last item belongs to one

    def answer_without(*fields: str) -> dict[str, Any]:
        """The answer that goes on, or a new one where it already has one of some fields."""
        nonlocal answer
        if answer is None or any(answer.get(field) for field in fields):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    for item in items:
        match item:
            case ReasoningItem():
                text = "".join(part.text for part in item.content or ())
                answer_without("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case MessageItem(role="assistant"):
                answer_without("content", "tool_calls")["content"] = _text(item.content)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls = answer_without().setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case FunctionOutputItem():
                answer = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case MessageItem():
                answer = None
                messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _text(content: str | list[MessageContent]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
