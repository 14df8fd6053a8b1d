"""Request bodies of `/v1/responses`, and the chats that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs
from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from runtime.generation.tool_calls.events import ToolCall
from runtime.server.answers.body import Body, BoundedList, NoEffect, SentBack, parse_request
from runtime.server.answers.chat import ChatBody, Effort, call_of, check_choice, custom_arguments, function_of, label_of
from runtime.server.answers.content import (
    Content,
    ContentPart,
    Result,
    as_text_or_parts,
    check_asked,
    joined,
    line_of,
    type_of,
)
from runtime.server.answers.request import (
    AnyJson,
    AnyText,
    GenerationRequest,
    MaxTokens,
    NamedSchema,
    format_constraint,
)
from runtime.server.errors import ErrorResponse, short_json
from runtime.server.responses.store import ResponseStore

# The types of tools that a model can call here, besides namespaces of these.
CALLABLE = ("function", "custom", "local_shell")

_TEXT = {"type": "string"}
_SHELL_ARGUMENTS: dict[str, Any] = {
    "command": {"type": "array", "items": _TEXT},
    "working_directory": _TEXT,
    "timeout_ms": {"type": "integer"},
    "env": {"type": "object", "additionalProperties": _TEXT},
    "user": _TEXT,
}
_NO_NAME = re.compile(r"[^A-Za-z0-9_.:-]")
_MAX_NAME = 128


# --- items ----------------------------------------------------------------------------------------


class SentBackItem(Body):
    """An item of a response, if a client sends it back."""

    id: SentBack = None
    status: SentBack = None


class MessageItem(SentBackItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ReasoningItem(SentBackItem):
    """The reasoning before an earlier answer; summaries and encrypted content are ignored."""

    type: Literal["reasoning"]
    summary: SentBack = None
    encrypted_content: SentBack = None
    content: BoundedList[ContentPart] | None = None


class FunctionCallItem(SentBackItem):
    """A call of a function, in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Annotated[str, BeforeValidator(as_text_or_parts)]


class CustomCallItem(SentBackItem):
    """A call of a custom tool, in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ShellCallItem(SentBackItem):
    """A call of the shell on the client's machine, in an earlier answer."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: dict[str, Any]


class ToolOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output", "local_shell_call_output"]
    id: str | None = Field(None, description="of the call, for `local_shell_call_output`")
    call_id: str | None = None
    status: SentBack = None
    output: Result


class ItemReference(Body):
    """An item of the output of an earlier response, by its id."""

    type: Literal["item_reference"] | None = None
    id: str


class OtherItem(Body):
    """An item of another type, of which nothing is read: a line in its place says so."""

    type: str

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`: the type."""
        yield self.type, False


_KINDS = {
    "message": "Message",
    "reasoning": "Reasoning",
    "function_call": "Call",
    "custom_tool_call": "CustomCall",
    "local_shell_call": "ShellCall",
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), "Output"),
    "item_reference": "Reference",
}


def _kind(item: Any) -> str | None:
    """The tag of an item; for a message, clients may leave its type out, and for a reference."""
    type = type_of(item)
    if isinstance(item, dict) and item.get("type") is None:
        type = "item_reference" if "id" in item and "role" not in item else "message"
    return None if type is None else _KINDS.get(type, "Other")


Item = Annotated[
    Annotated[MessageItem, Tag("Message")]
    | Annotated[ReasoningItem, Tag("Reasoning")]
    | Annotated[FunctionCallItem, Tag("Call")]
    | Annotated[CustomCallItem, Tag("CustomCall")]
    | Annotated[ShellCallItem, Tag("ShellCall")]
    | Annotated[ToolOutputItem, Tag("Output")]
    | Annotated[ItemReference, Tag("Reference")]
    | Annotated[OtherItem, Tag("Other")],
    Discriminator(_kind),
]

ITEM: TypeAdapter[Any] = TypeAdapter(Item)


# --- tools ----------------------------------------------------------------------------------------


@attrs.frozen
class OfferedTool:
    """A tool of a request, which the model calls as a function."""

    type: Literal["function", "custom", "local_shell"]
    name: str  # as in the request
    namespace: str | None  # likewise
    offered: dict[str, Any]  # the function; its name differs from every other one's

    @property
    def place(self) -> dict[str, str]:
        """The name of a call of the tool, and its namespace, if it is in one."""
        return {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}

    def item(self, call: ToolCall, *, is_whole: bool) -> tuple[str, dict[str, Any]] | None:
        """A call as an item of the output, of a tool that is no function; one that is cut off is empty.

        Returns: the first part of its id, and its fields. None if the arguments are not those of such an item.
        """
        if self.type == "custom":
            values = call.values if is_whole else {"input": ""}
            is_text = values.keys() == {"input"} and isinstance(values["input"], str)
            text = values["input"] if is_text else call.arguments  # all that the model wrote
            return "ctc", {"type": "custom_tool_call", "call_id": call.id, **self.place, "input": text}
        values = call.values if is_whole else {"command": []}
        known = {name: each for name, each in values.items() if name in _SHELL_ARGUMENTS}
        command = known.get("command")
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            return None
        return "lsh", {"type": "local_shell_call", "call_id": call.id, "action": {"type": "exec", "env": {}, **known}}


@attrs.frozen
class OfferedTools:
    """The tools of a request that a model may call, by the names of their functions, and those that are left out."""

    by_name: dict[str, OfferedTool]
    listed: Sequence[OfferedTool]
    left_out: Sequence[Any]

    @classmethod
    def of(cls, tools: Iterable[Any]) -> OfferedTools:
        """The tools of a request. Those of a namespace are told apart by its name in front of theirs."""
        given = list(_flat(tools))
        names = {tool.name for namespace, tool in given if namespace is None}
        listed, left_out = [], []
        for namespace, tool in given:
            if tool.type not in CALLABLE:
                left_out.append(tool)
                continue
            name = tool.name or (tool.type if tool.type == "local_shell" else "")
            unique = name
            if namespace is not None:
                full, number = _full_name(name, namespace), 1
                unique = full
                while unique in names:
                    number += 1
                    unique = f"{full[: _MAX_NAME - 5]}_{number}"
                names.add(unique)
            listed.append(OfferedTool(tool.type, name, namespace, _function(tool, unique)))
        return cls({tool.offered["function"].get("name"): tool for tool in listed}, listed, left_out)

    def name_of(self, name: str, namespace: str | None) -> str:
        """The name of the function that a call in the history is one of; the tool may no longer be there."""
        found = self._found(name, namespace)
        if len(found) == 1:
            return str(found[0].offered["function"]["name"])
        return name if namespace is None else _full_name(name, namespace)

    def chosen(self, choice: Any) -> tuple[list[dict[str, Any]], str, list[str] | None]:
        """The functions of the chat, its choice, and the allowed ones. Raises: ErrorResponse: see `check_choice`."""
        functions = [tool.offered for tool in self.listed]
        if choice is None or isinstance(choice, str):
            wanted = choice or "auto"
        else:
            names = [tool.offered["function"]["name"] for tool in self._chosen_by(choice)]
            if choice.type != "allowed_tools":
                wanted = names[0] if len(names) == 1 else choice.name or choice.type
            elif names:
                return functions, choice.mode or "auto", names
            else:
                # All that is allowed is left out.
                functions, wanted = [], choice.mode or "auto"
        check_choice(wanted, functions, self.left_out)
        return functions, wanted, None

    def _chosen_by(self, choice: Any) -> list[OfferedTool]:
        """The tools that a choice, or an entry of one, names."""
        if choice.type == "allowed_tools":
            return [tool for each in choice.tools or () for tool in self._chosen_by(each)]
        if choice.type == "namespace":
            return [tool for tool in self.listed if tool.namespace == choice.name]
        return self._found(choice.name or choice.type, getattr(choice, "namespace", None))

    def _found(self, name: str, namespace: str | None) -> list[OfferedTool]:
        """The tool of a name; without a namespace, the one outside of all, else all of that name, or offered by it."""
        found = [tool for tool in self.listed if (tool.name, tool.namespace) == (name, namespace)]
        if found or namespace is not None:
            return found
        return [tool for tool in self.listed if name in (tool.name, tool.offered["function"].get("name"))]


def _flat(tools: Iterable[Any]) -> Iterator[tuple[str | None, Any]]:
    """Each tool with the name of its namespace."""
    for tool in tools:
        if tool.type == "namespace":
            yield from ((tool.name or "", inner) for inner in tool.tools or ())
        else:
            yield None, tool


def _function(tool: Any, name: str) -> dict[str, Any]:
    description = tool.description
    if tool.type == "function":
        return function_of(name=name or None, description=description, parameters=tool.parameters, strict=tool.strict)
    if tool.type == "local_shell":
        required, properties = "command", _SHELL_ARGUMENTS
        description = "Run a command on the user's machine."
    else:
        # The input is any text. A grammar for it is part of the description: a constrained call is a JSON object,
        # which the grammar does not describe.
        required, properties = "input", {"input": _TEXT}
        match tool.format:
            case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
                rule = f"The input must match this grammar ({syntax}):\n{definition}"
                description = f"{description}\n\n{rule}" if description else rule
    schema = {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}
    return function_of(name=name, description=description, parameters=schema)


def _full_name(name: str, namespace: str) -> str:
    joint = "" if not namespace or namespace.endswith("_") else "__"
    return _NO_NAME.sub("_", f"{namespace}{joint}{name}")[-_MAX_NAME:]


# --- the chat -------------------------------------------------------------------------------------


def messages_of(items: Iterable[Any], tools: OfferedTools) -> list[dict[str, Any]]:
    """The messages of a chat that items stand for, without references among them.

    Reasoning, text and calls of one answer are several items, but one message of a chat.
    """
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the answer that the last item belongs to, if any

    def answer_without(*fields: str) -> dict[str, Any]:
        """The current answer, or a new one if there is none or it already has one of the fields."""
        nonlocal answer
        if answer is None or any(answer.get(field) for field in fields):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    def call(item: Any, name: str, arguments: str) -> None:
        answer_without().setdefault("tool_calls", []).append(call_of(item.call_id or item.id, name, arguments))

    for item in items:
        match item:
            case ReasoningItem():
                message = answer_without("reasoning_content", "content", "tool_calls")
                if thought := joined(item.content or []):
                    message["reasoning_content"] = thought
            case MessageItem(role="assistant"):
                # Beside calls before it: a result must follow its call.
                answer_without("content")["content"] = joined(item.content)
            case FunctionCallItem():
                call(item, tools.name_of(item.name, item.namespace), item.arguments)
            case CustomCallItem():
                call(item, tools.name_of(item.name, item.namespace), custom_arguments(item.input))
            case ShellCallItem():
                given = {name: value for name, value in item.action.items() if name != "type" and value is not None}
                call(item, "local_shell", json.dumps(given, ensure_ascii=False))
            case ToolOutputItem():
                answer = None
                result = {"role": "tool", "content": joined(item.output or "")}
                if id := item.call_id or item.id:
                    result["tool_call_id"] = id
                messages.append(result)
            case MessageItem():
                answer = None
                # "developer" is OpenAI's newer name for "system"; chat templates do not know it.
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": joined(item.content, is_system=role == "system")})
            case OtherItem() if item.type.endswith("_call"):
                # Of a tool that a service has run while it wrote the answer.
                answer_without("content", "tool_calls")["content"] = line_of(item.type)
            case OtherItem():
                answer = None
                messages.append({"role": "user", "content": line_of(item.type)})
    return messages


# The only value of `include` that has an effect.
LOGPROBS = "message.output_text.logprobs"
# Fields that the response repeats as they came.
GIVEN_BACK = ("metadata", "reasoning", "text", "tools", "tool_choice")


class JsonSchemaFormat(NamedSchema):
    """JSON that matches a schema."""

    type: Literal["json_schema"]


class TextConfig(Body):
    """The form of the text."""

    format: Annotated[AnyText | AnyJson | JsonSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningConfig(Body):
    """How much the model reasons, passed to its chat template; "none" turns reasoning off, if the template can."""

    effort: Effort | None = None
    summary: NoEffect = None


class ResponsesTool(Body):
    """A tool that the client runs. Tools of other types, which OpenAI's service runs, are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Any = Field(None, description="of the input of a custom tool")
    tools: BoundedList[ResponsesTool] | None = Field(None, description="those of a namespace")
    defer_loading: NoEffect = None

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; of a tool that is left out, its type."""
        if self.type in CALLABLE or self.type == "namespace":
            yield from super().ignored_names()
        else:
            yield label_of(self), False


class ResponsesToolChoice(Body):
    """The tool that the model must call, or the tools that it may call."""

    type: str
    name: str | None = None
    namespace: str | None = None
    server_label: SentBack = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ResponsesTool] | None = None


class ResponsesRequest(ChatBody):
    """The body of a request to `/v1/responses`: a conversation to continue."""

    input: str | Annotated[list[Item], Field(max_length=10_000, fail_fast=True)]
    instructions: str | None = Field(None, description="the system message; not kept for later responses")
    previous_response_id: str | None = Field(None, description="continue the conversation of a stored response")
    store: bool | None = Field(None, description="false: do not keep the response for later ones")
    max_output_tokens: MaxTokens | None = Field(None, description="maximum number of tokens in the answer")
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: BoundedList[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[str], Field(max_length=100)] | None = Field(
        None, description=f'"{LOGPROBS}": the log-probability of each token of the answer; other values have no effect'
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="number of most probable tokens to return with each token of the answer"
    )
    metadata: dict[str, Any] | None = Field(None, description="returned with the response")
    user: str | None = Field(None, description="returned with the response")
    service_tier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    safety_identifier: NoEffect = None
    background: bool | None = Field(None, description="must not be true: a client that leaves cancels its request")
    conversation: Any = Field(None, description="must be null; use `previous_response_id` instead")
    prompt: Any = Field(None, description="must be null; send the text as `input` instead")

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; also `include`, if it asks for anything but log-probabilities."""
        yield from super().ignored_names()
        if any(included != LOGPROBS for included in self.include or ()):
            yield "include", False


@attrs.frozen
class ParsedRequest:
    """A request to `/v1/responses`."""

    request: ResponsesRequest
    generation: GenerationRequest
    tools: OfferedTools
    messages: bytes  # of the chat before the answer, without the instructions, as JSON; b"" if nothing is stored
    begun: dict[str, Any] | None  # the message that the answer continues


def parse_response_request(body: bytes, store: ResponseStore) -> ParsedRequest:
    """Parse a body, and look up the response that it continues. Raises: ErrorResponse: it is invalid, or not stored."""
    request = parse_request(ResponsesRequest, body)
    _check_support(request)
    tools = OfferedTools.of(request.tools or ())
    messages = _messages(request, store, tools)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if not (system or messages):
        raise ErrorResponse(400, "input must have at least one message; add it", param="input")
    functions, choice, allowed = tools.chosen(request.tool_choice)
    effort = None if request.reasoning is None else request.reasoning.effort
    has_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    is_parallel = request.parallel_tool_calls
    chat = request.chat_of([*system, *messages], functions, choice, is_parallel, allowed=allowed, effort=effort)
    generation = request.request_of(
        prompt_field="input",
        chat=chat,
        format=format_constraint(None if request.text is None else request.text.format),
        num_logprobs=(request.top_logprobs or 0) if has_logprobs else None,
        max_tokens=request.max_output_tokens,
        max_tokens_field="max_output_tokens",
    )
    begun = messages.pop() if chat.continues else None
    stored = json.dumps(messages, ensure_ascii=False).encode() if request.store is not False else b""
    return ParsedRequest(request, generation, tools, stored, begun)


_UNSUPPORTED = {
    "background": "a request whose client leaves is cancelled; leave it out, or set stream",
    "conversation": "conversations are not stored; send previous_response_id",
    "prompt": "prompts are not stored; send the text as input",
}


def _check_support(request: ResponsesRequest) -> None:
    for field, remedy in _UNSUPPORTED.items():
        if getattr(request, field) not in (None, False):
            raise ErrorResponse(400, f"{field} is not supported: {remedy}", param=field)
    for field in GIVEN_BACK:
        try:
            json.dumps(request.model_dump(include={field}, by_alias=True), allow_nan=False)
        except ValueError as error:
            message = f"{field} must be JSON, to be given back: {error}; leave NaN and infinite numbers out"
            raise ErrorResponse(400, message, param=field) from error


def _messages(request: ResponsesRequest, store: ResponseStore, tools: OfferedTools) -> list[dict[str, Any]]:
    """The messages of a request after those of the response that it continues."""
    messages: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        previous = store.get(request.previous_response_id)
        if previous is None:
            raise ErrorResponse(
                400,
                f"the response {short_json(request.previous_response_id)} is not stored, or no longer; "
                "send its conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        messages = json.loads(previous.messages)
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    items: list[Any] = []
    for item in request.input:
        if isinstance(item, ItemReference):
            if (stored := store.item(item.id)) is None:
                message = f"the item {short_json(item.id)} is not stored, or no longer; send it as input"
                raise ErrorResponse(404, message, param="input")
            item = ITEM.validate_json(stored)
        items.append(item)
    check_asked(items, "input", lambda item: isinstance(item, ToolOutputItem))
    return messages + messages_of(items, tools)
