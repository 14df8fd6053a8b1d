"""A chat to continue, in the form of chat templates and not of any API; the APIs translate their requests to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import attrs
from pydantic import AliasChoices, Field, ValidationError

from protocol.errors import SettingsError
from runtime.generation.text import Prompt
from runtime.generation.tool_calls.tools import Tools, tools_of
from runtime.server.answers.body import Body, NoEffect, RequestBody, ignored_fields, validated, without_halves
from runtime.server.answers.client_tools import callable_in_chat, check_choice, custom_arguments, label_of
from runtime.server.answers.content import Content, check_asked, joined, line_of, reasoning_in
from runtime.server.answers.request import Objects, Request
from runtime.server.errors import ErrorResponse, error_response_of_body, short_json

Effort = Annotated[str, Field(max_length=100)]


def function_of(**function: Any) -> dict[str, Any]:
    """A tool, or the choice of one, from the fields of its function that are not None."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def call_of(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a function, in an earlier answer."""
    return {"id": id, **function_of(name=name, arguments=arguments)}


class ChatMessage(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of `reasoning_content`")
    tool_calls: Objects | None = None
    tool_call_id: str | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the message calls functions."""
        return bool(self.tool_calls)

    @property
    def _other_calls(self) -> list[str]:
        return [str(call["type"]) for call in self.tool_calls or () if not _can_be_read(call)]

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; also the types of calls that are none of functions."""
        yield from super().ignored_names()
        yield from ((f"tool_calls.{type}", False) for type in self._other_calls)

    @property
    def may_go_on(self) -> bool:
        """Whether an answer continues the message if it is the last one, unless the request says otherwise."""
        return self.role == "assistant" and not self.has_calls

    def plain(self) -> dict[str, Any]:
        """The message for a chat template."""
        # "developer" is OpenAI's newer name for "system"; chat templates do not know it.
        role = "system" if self.role == "developer" else self.role
        plain: dict[str, Any] = {"role": role, "content": joined(self.content or "", is_system=role == "system")}
        if reasoning := self.reasoning_content or self.reasoning or reasoning_in(self.content):
            plain["reasoning_content"] = reasoning
        if calls := [_plain_call(call) for call in self.tool_calls or () if _can_be_read(call)]:
            plain["tool_calls"] = calls
        for type in self._other_calls:
            plain["content"] = f"{plain['content']}\n{line_of(type)}".lstrip("\n")
        if self.role == "tool":
            result = {"tool_call_id": self.tool_call_id or None, "name": self.name}
            plain |= {key: value for key, value in result.items() if value is not None}
        return plain


def _can_be_read(call: dict[str, Any]) -> bool:
    """Whether a call in an earlier answer is one of a function or of a custom tool."""
    return "function" in call or "custom" in call or "type" not in call


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call in an earlier answer as one of a function; a call of a custom tool has a text for its arguments."""
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            return call_of(call.get("id") or "", name, custom_arguments(text))
        case {"function": {"arguments": str(text), **function}} if "\\u" in text:
            # JSON in a text, whose escapes those of the body do not include.
            return {**call, "function": {**function, "arguments": without_halves(text.encode()).decode()}}
    return call


class Thinking(Body):
    """Whether the model reasons before it answers, in Anthropic's form."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NoEffect = None


class Prediction(Body):
    """A predicted text, such as a file being edited; the drafter drafts from it."""

    type: Literal["content"]
    content: Content


# Parameters of `apply_chat_template` that are no variables. A template is a program: only the model's own may run.
_NO_VARIABLES = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


class Chat(Request):
    """A chat to continue."""

    prompt_field = "messages"
    is_chat = True
    # Lists of objects are bounded for the time that it takes to read them.
    messages: list[ChatMessage] = Field(min_length=1, max_length=10_000, fail_fast=True)
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Objects | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description='"none", "auto", "required", the function that must be called, or the tools that may be',
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description='whether an answer may have several tool calls; by default, only if `tool_choice` is "auto"',
    )
    reasoning_effort: Effort | None = Field(
        None, description='passed to the chat template; "none" switches reasoning off, if the template can'
    )
    thinking: Thinking | bool | None = Field(
        None,
        validation_alias=AliasChoices("thinking", "enable_thinking"),
        description="whether the model reasons before it answers, if its chat template has a switch for that; also "
        "`enable_thinking`",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        validation_alias=AliasChoices("chat_template_kwargs", "chat_template_args"),
        description="further variables of the chat template",
    )
    continue_final_message: bool | None = Field(
        None,
        description="true: the answer continues the last message; false: it is a new message; by default, it continues "
        "a last message of the assistant's that has no tool calls",
    )
    add_generation_prompt: bool | None = Field(
        None, description="true: the answer is a new message; false: the prompt ends with the last message"
    )
    prediction: Prediction | None = Field(None, description="a text that the answer may resemble; it helps the drafter")

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; also the tools that are left out."""
        yield from super().ignored_names()
        yield from ((f"tools.{label_of(tool)}", False) for tool in self.tools or () if not callable_in_chat(tool))

    def check(self) -> None:
        super().check()
        check_asked(self.messages, "messages", lambda message: message.role in ("tool", "function"))
        if self.top_logprobs and self.logprobs is None:
            raise ErrorResponse(400, "top_logprobs needs logprobs: true; add it or leave it out", param="top_logprobs")
        if self.continue_final_message and (problem := self._problem_of_continuing()) is not None:
            message = f"continue_final_message {problem}; leave it out"
            raise ErrorResponse(400, message, param="continue_final_message")
        if taken := sorted(_NO_VARIABLES & (self.chat_template_kwargs or {}).keys()):
            message = f"chat_template_kwargs cannot have {taken[0]}, which is no variable of the template; leave it out"
            raise ErrorResponse(400, message, param="chat_template_kwargs")

    def _problem_of_continuing(self) -> str | None:
        last = self.messages[-1]
        if self.add_generation_prompt:
            return "cannot go together with add_generation_prompt: true, which begins a new message"
        if last.role != "assistant":
            return f"needs a last message of the assistant's, got one of {last.role!r}"
        return "cannot continue a message with calls, which is complete" if last.has_calls else None

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message; the default is llama.cpp's."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        return self.messages[-1].may_go_on and not self.add_generation_prompt

    def prompts(self, *, has_template: bool) -> Sequence[Prompt]:
        messages = [message.plain() for message in self.messages]
        if not has_template:
            # One running text, as in a conversation with a base model.
            return ["".join(message["content"] for message in messages)]
        messages[-1] |= {"prefix": self.continues}
        return [messages]

    @property
    def template_variables(self) -> dict[str, Any]:
        variables: dict[str, Any] = {} if self.add_generation_prompt is not False else {"add_generation_prompt": False}
        if self.reasoning_effort == "none":
            variables["enable_thinking"] = False
        elif self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        if self.thinking is not None:
            is_on = self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
            variables["enable_thinking"] = is_on
        return {**variables, **(self.chat_template_kwargs or {})}

    @property
    def reasoning_field(self) -> str | None:
        if self.thinking is not None:
            return "thinking"
        return "reasoning_effort" if self.reasoning_effort == "none" else None

    @property
    def has_tools(self) -> bool:
        return bool(self.tools)

    def checked_tools(self) -> Tools | None:
        return checked_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def predicted_text(self) -> str:
        return "" if self.prediction is None else joined(self.prediction.content)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_length(self) -> int:
        return sum(len(message.plain()["content"]) for message in self.messages)


def checked_tools(listed: Any, choice: Any, is_parallel: bool | None) -> Tools | None:
    """The tools of a request; None where the model may call nothing.

    Args:
        listed, is_parallel: see `tools_of`.
        choice: likewise, or a function or the allowed tools as an object.

    Raises: ErrorResponse: a tool or the choice is invalid.
    """
    allowed: list[Any] | None = None
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(allowed)}}:
            choice = mode
            allowed = [
                (tool.get("function") or tool).get("name") if isinstance(tool, Mapping) else tool
                for tool in allowed
                if callable_in_chat(tool)
            ]
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            choice = name
        case str() | None:
            # "any" is Mistral's name.
            choice = {None: "auto", "any": "required"}.get(choice, choice)
        case _:
            raise ErrorResponse(
                400,
                'tool_choice must be "none", "auto", "required", '
                '{"type": "function", "function": {"name": "…"}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}, '
                f"got {short_json(choice)}",
                param="tool_choice",
            )
    offered = [tool for tool in listed or () if callable_in_chat(tool)]
    check_choice(choice, offered, [tool for tool in listed or () if not callable_in_chat(tool)])
    try:
        return tools_of(offered, choice, is_parallel=is_parallel, allowed=allowed)
    except SettingsError as error:
        raise ErrorResponse(400, str(error), param="tools") from error


# --- translation ----------------------------------------------------------------------------------

# Fields that each API has in a form of its own.
_OF_ITS_OWN = frozenset(
    (
        *("model", "stream", "max_tokens", "messages", "response_format", "thinking"),
        *("tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs"),
    )
)


def _names(body: type[Body]) -> Iterator[str]:
    for name, field in body.model_fields.items():
        yield name
        if isinstance(field.validation_alias, AliasChoices):
            yield from map(str, field.validation_alias.choices)


# Fields that mean the same in every API.
PASSED_ON = frozenset(_names(Chat)) - _OF_ITS_OWN


R = TypeVar("R", bound=RequestBody)
C = TypeVar("C", bound=Chat)


def parse_translated(
    body: bytes, request_type: type[R], chat_type: type[C], fields: Callable[[R], Mapping[str, Any]]
) -> tuple[R, C]:
    """Parse and validate the body of a request, and translate it. Unknown fields in `PASSED_ON` are taken as in a chat.

    Args:
        fields: returns the fields of the chat that a body stands for; may raise ErrorResponse.

    Raises: ErrorResponse: the body is invalid.
    """
    try:
        request = validated(request_type, body)
        passed_on = {name: value for name, value in (request.model_extra or {}).items() if name in PASSED_ON}
        chat = chat_type.model_validate({**passed_on, **fields(request)})
        chat.take_other_names()
    except ValidationError as error:
        raise error_response_of_body(error) from error
    ignored = ignored_fields(request, PASSED_ON)
    chat.keep_ignored(attrs.evolve(ignored, unknown=(*ignored.unknown, *ignored_fields(chat).unknown)))
    chat.check()
    return request, chat
