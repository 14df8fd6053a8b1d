"""Request bodies in Anthropic's format, and the chats that they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from runtime.server.answers.body import Body, BoundedList, NoEffect, RequestBody, SentBack
from runtime.server.answers.chat import Chat, Effort, call_of, function_of, joined, parse_translated
from runtime.server.answers.request import MaxTokens, Stops
from runtime.server.answers.setting_fields import GenerationBody
from runtime.server.errors import ErrorResponse

# --- blocks of content ----------------------------------------------------------------------------


class CachedBody(Body):
    """An object that may mark the end of a prefix to cache. Here prefixes are cached without marks."""

    cache_control: NoEffect = None


class TextBlock(CachedBody):
    """Text."""

    type: Literal["text"]
    text: str
    citations: SentBack = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer, which the client sends back."""

    type: Literal["thinking"]
    thinking: str
    signature: SentBack = None


class RedactedThinkingBlock(Body):
    """Reasoning that only Anthropic's service can read; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: SentBack = None


class PlainTextSource(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: NoEffect = None
    data: str


class DocumentBlock(CachedBody):
    """A document; only plain text is supported."""

    type: Literal["document"]
    source: PlainTextSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        """The document with its title and its context before it."""
        return "\n".join(part for part in (self.title, self.context, self.source.data) if part)


class ToolUseBlock(CachedBody):
    """A call of a tool, in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(CachedBody):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | BoundedList[TextBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | DocumentBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | BoundedList[Block]

    @property
    def ends_in_space(self) -> bool:
        """Whether the message ends with text that ends with white space."""
        if isinstance(self.content, str):
            return self.content[-1:].isspace()
        return any(block.text[-1:].isspace() for block in self.content[-1:] if isinstance(block, TextBlock))


# --- other fields ---------------------------------------------------------------------------------


class ThinkingConfig(Body):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: NoEffect = None
    display: NoEffect = None


class JsonFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer, and how much the model reasons (`effort`, passed to its chat template)."""

    format: JsonFormat | None = None
    effort: Effort | None = None


class MessagesTool(CachedBody):
    """A tool that the client runs. Tools of other types, which Anthropic's service runs, are ignored."""

    type: str | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class MessagesToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class TokenCountRequest(RequestBody, CachedBody):
    """The body of a request to `/v1/messages/count_tokens`: a conversation."""

    messages: list[InputMessage] = Field(min_length=1, max_length=10_000, fail_fast=True)
    system: str | BoundedList[TextBlock] | None = None
    thinking: ThinkingConfig | None = Field(None, description="by default, the model's chat template decides")
    tools: BoundedList[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    metadata: NoEffect = None
    service_tier: NoEffect = None

    def fields(self) -> dict[str, Any]:
        """The fields of the chat that this stands for. Raises: ErrorResponse: it asks for something unsupported."""
        fields: dict[str, Any] = {"model": self.model, "messages": list(self._messages())}
        if self.thinking is not None:
            fields["thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "answer", "schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if tools := [_tool(tool) for tool in self.tools or () if tool.input_schema is not None]:
            fields["tools"] = tools
            if self.tool_choice is not None:
                fields["tool_choice"] = _tool_choice(self.tool_choice)
                if self.tool_choice.disable_parallel_tool_use is not None:
                    fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        return fields

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": joined(self.system)}
        for message in self.messages:
            yield from _messages_of(message)


class MessagesRequest(TokenCountRequest, GenerationBody):
    """The body of a request to `/v1/messages`: a conversation to continue."""

    max_tokens: MaxTokens | None = Field(None, description="maximum number of tokens in the answer")
    stop_sequences: Stops | None = None

    def fields(self) -> dict[str, Any]:
        """See `TokenCountRequest`.

        Raises: ErrorResponse: the message to continue ends with white space, which Anthropic's API refuses.
        """
        last = self.messages[-1]
        if last.role == "assistant" and last.ends_in_space:
            message = "messages: final assistant content cannot end with trailing whitespace; take it away"
            raise ErrorResponse(400, message, param="messages")
        fields = super().fields() | self.given_settings() | {"max_tokens": self.max_tokens, "stream": self.stream}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        return fields


# --- translation ----------------------------------------------------------------------------------


_BLOCK_TYPES = frozenset(("text", "thinking", "redacted_thinking", "document", "tool_use", "tool_result"))


def parse_chat(request_type: type[TokenCountRequest], body: bytes) -> Chat:
    """Parse and validate the body of a request.

    Returns: the chat that it stands for.

    Raises: ErrorResponse: the body is invalid.
    """
    _, chat = parse_translated(body, request_type, Chat, _BLOCK_TYPES, request_type.fields)
    return chat


def _messages_of(message: InputMessage) -> Iterator[dict[str, Any]]:
    """The messages of a chat that a message stands for: in a chat, results of tools are messages of their own."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in message.content:
        match block:
            case TextBlock() | DocumentBlock():
                texts.append(block.text)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                calls.append(call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
            case ToolResultBlock():
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)})
    yield from results
    if texts or reasoning or calls or not results:
        plain: dict[str, Any] = {"role": message.role, "content": "".join(texts)}
        if reasoning:
            plain["reasoning_content"] = "".join(reasoning)
        if calls:
            plain["tool_calls"] = calls
        yield plain


def _result(block: ToolResultBlock) -> str:
    text = joined(block.content or "")
    # Chats have no field for errors.
    return f"Error: {text}" if block.is_error else text


def _tool(tool: MessagesTool) -> dict[str, Any]:
    return function_of(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)


def _tool_choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise ErrorResponse(400, "tool_choice.name is missing; add the name of the tool", param="tool_choice.name")
        return function_of(name=choice.name)
    return "required" if choice.type == "any" else choice.type
