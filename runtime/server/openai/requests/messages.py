"""Messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.server.answers.body import Body, SentBack
from runtime.server.openai.requests.field_types import Objects
from runtime.server.openai.tool_fields import calls_and_results


class TextPart(Body):
    """A part of a message's text."""

    type: Literal["text"]
    text: str


def joined(content: str | list[TextPart]) -> str:
    """The text of a content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Objects | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = Field(
        None, description="Mistral's field: whether the answer continues this message, if it is the last one"
    )
    refusal: SentBack = None
    audio: SentBack = None
    annotations: SentBack = None

    @property
    def has_calls(self) -> bool:
        """Whether the message calls functions."""
        return bool(self.tool_calls or self.function_call)

    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        content = joined(self.content or "")
        # "developer" is OpenAI's newer name for "system"; chat templates do not know it.
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        return {**plain, **calls_and_results(self)}
