"""Request bodies in Anthropic's format, and the chats that they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from runtime.server.answers.body import Body, BoundedList, NoEffect
from runtime.server.answers.chat import ChatBody, Effort, call_of, check_choice, function_of, label_of
from runtime.server.answers.content import (
    CachedBody,
    Content,
    Kinds,
    Result,
    TextPart,
    check_asked,
    joined,
    kind_of_part,
    reasoning_in,
    type_of,
)
from runtime.server.answers.request import GenerationRequest, MaxTokens, Stops
from runtime.server.errors import ErrorResponse
from runtime.server.grammars.schemas import Constraint


class ToolUseBlock(CachedBody):
    """A call of a tool, in an earlier answer. Arguments that were cut off may be sent back as text."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None

    @property
    def arguments(self) -> str:
        """The arguments as JSON, or whatever text the client has in their place."""
        if isinstance(self.input, str):
            return self.input if self.input.strip() else "{}"
        return "{}" if self.input is None else json.dumps(self.input, ensure_ascii=False)


class ToolResultBlock(CachedBody):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Result = None
    is_error: bool | None = None


def _kind(block: Any) -> str | None:
    return {"tool_use": "ToolUse", "tool_result": "ToolResult"}.get(type_of(block) or "", kind_of_part(block))


MessageBlock = Annotated[
    Kinds | Annotated[ToolUseBlock, Tag("ToolUse")] | Annotated[ToolResultBlock, Tag("ToolResult")],
    Discriminator(_kind),
]


class InputMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | BoundedList[MessageBlock]

    @property
    def blocks(self) -> list[Any]:
        """Its content, also if that is a text."""
        return self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content)]


class JsonFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] | bool = Field(alias="schema")


class OutputConfig(Body):
    """The form of the answer, and how much the model reasons (`effort`, passed to its chat template)."""

    format: JsonFormat | None = None
    effort: Effort | None = None


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object of some properties."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_TEXT, _WHOLE = {"type": "string"}, {"type": "integer"}


def _edits(*further: str, **properties: Any) -> dict[str, Any]:
    """The arguments of a tool that views and edits files, as Anthropic documents them."""
    return _object(
        ("command",),
        command={"type": "string", "enum": ["view", "create", "str_replace", "insert", *further]},
        path=_TEXT,
        view_range={"type": "array", "items": _WHOLE},
        file_text=_TEXT,
        old_str=_TEXT,
        new_str=_TEXT,
        insert_line=_WHOLE,
        **properties,
    )


# Tools that the client runs, by the beginning of their type: what they do, and their arguments.
_CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": (
        "Run a command in a bash session, which goes on from call to call. restart: true begins a new session.",
        _object((), command=_TEXT, restart={"type": "boolean"}),
    ),
    "text_editor_2024": ("View, create and edit files.", _edits("undo_edit")),
    "text_editor_20250124": ("View, create and edit files.", _edits("undo_edit")),
    "text_editor_": ("View, create and edit files.", _edits(insert_text=_TEXT)),
    "memory_": (
        "View, create and edit the files of the memory, which are below /memories.",
        _edits("delete", "rename", insert_text=_TEXT, old_path=_TEXT, new_path=_TEXT),
    ),
}


class MessagesTool(CachedBody):
    """A tool that the client runs. Tools of other types, which Anthropic's service runs, are left out."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def function(self) -> dict[str, Any] | None:
        """The tool as a function of a chat; None if it is left out."""
        description, parameters = self.description, self.input_schema
        if parameters is None and self.type not in (None, "custom"):
            known = (found for begin, found in _CLIENT_TOOLS.items() if (self.type or "").startswith(begin))
            description, parameters = next(known, (None, None))
            if parameters is None:
                return None
        return function_of(name=self.name, description=description, parameters=parameters, strict=self.strict)

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; of a tool that is left out, its type."""
        if self.function is None:
            yield label_of(self), False
        else:
            yield from super().ignored_names()


class MessagesToolChoice(Body):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(ChatBody, CachedBody):
    """The body of a request to `/v1/messages` or `/v1/messages/count_tokens`: a conversation to continue."""

    messages: list[InputMessage] = Field(min_length=1, max_length=10_000, fail_fast=True)
    system: Content | None = None
    max_tokens: MaxTokens | None = Field(None, description="maximum number of tokens in the answer")
    stop_sequences: Stops | None = None
    tools: BoundedList[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    metadata: NoEffect = None
    service_tier: NoEffect = None

    def check_last(self) -> None:
        """Raises: ErrorResponse: the message to continue ends with white space, which Anthropic's API refuses."""
        last = self.messages[-1]
        ends = [block.text[-1:] for block in last.blocks[-1:] if isinstance(block, TextPart)]
        if last.role == "assistant" and any(end.isspace() for end in ends):
            message = "messages: final assistant content cannot end with trailing whitespace; take it away"
            raise ErrorResponse(400, message, param="messages")

    def generation(self) -> GenerationRequest:
        """The request in the form of no API. Raises: ErrorResponse: it asks for something unsupported."""
        config = self.output_config or OutputConfig()
        functions, choice, is_parallel = self._tools()
        chat = self.chat_of(list(self._messages()), functions, choice, is_parallel, effort=config.effort)
        return self.request_of(
            prompt_field="messages",
            chat=chat,
            format=None if config.format is None else Constraint("json", config.format.schema_, "response_format"),
            num_logprobs=None,
            stop=self.stop_sequences or None,
            max_tokens=self.max_tokens,
        )

    def _tools(self) -> tuple[list[dict[str, Any]], str | None, bool | None]:
        """The functions that are offered, which of them the model may call, and whether it may call several."""
        known = [(tool, tool.function) for tool in self.tools or ()]
        functions = [function for _, function in known if function is not None]
        if (given := self.tool_choice) is None:
            return functions, None, None
        choice = {"any": "required", "tool": given.name}.get(given.type, given.type)
        if choice is None:
            raise ErrorResponse(400, "tool_choice.name is missing; add the name of the tool", param="tool_choice.name")
        check_choice(choice, functions, [tool for tool, function in known if function is None])
        alone = given.disable_parallel_tool_use
        return functions, choice, None if alone is None else not alone

    def _messages(self) -> Iterator[dict[str, Any]]:
        if system := joined(self.system or "", is_system=True):
            yield {"role": "system", "content": system}
        check_asked(
            self.messages, "messages", lambda message: any(isinstance(each, ToolResultBlock) for each in message.blocks)
        )
        for message in self.messages:
            yield from _messages_of(message)


def _messages_of(message: InputMessage) -> Iterator[dict[str, Any]]:
    """The messages of a chat that a message stands for: in a chat, results of tools are messages of their own."""
    blocks = message.blocks
    calls = [call_of(block.id, block.name, block.arguments) for block in blocks if isinstance(block, ToolUseBlock)]
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        text = joined(result.content or "")
        # Chats have no field for errors.
        text = f"Error: {text}" if result.is_error else text
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
    rest = [block for block in blocks if not isinstance(block, (ToolUseBlock, ToolResultBlock))]
    if rest or calls or not results:
        plain: dict[str, Any] = {"role": message.role, "content": joined(rest, is_system=message.role == "system")}
        if reasoning := reasoning_in(rest):
            plain["reasoning_content"] = reasoning
        if calls:
            plain["tool_calls"] = calls
        yield plain
