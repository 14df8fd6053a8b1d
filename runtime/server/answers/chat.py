"""Chats to continue: the fields that the bodies of all APIs share, and calls and tools as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from protocol.errors import SettingsError
from runtime.generation.tool_calls.tools import tools_of
from runtime.server.answers.body import Body, NoEffect, without_halves
from runtime.server.answers.content import Content, joined
from runtime.server.answers.request import ChatPrompt, GenerationBody
from runtime.server.errors import ErrorResponse

Effort = Annotated[str, Field(max_length=100)]


def function_of(**function: Any) -> dict[str, Any]:
    """A tool, or the choice of one, from the fields of its function that are not None."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def call_of(id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a function, in an earlier answer."""
    # JSON in a text, whose escapes those of the body do not include.
    whole = without_halves(arguments.encode()).decode() if "\\u" in arguments else arguments
    return {"id": id, **function_of(name=name, arguments=whole)}


def custom_arguments(input: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({"input": input}, ensure_ascii=False)


class Thinking(Body):
    """Whether the model reasons before it answers, and with how many tokens at most, in Anthropic's form."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0)] | None = None
    display: NoEffect = None


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


class ChatBody(GenerationBody):
    """The fields that a request to continue a chat has in every API."""

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

    def given_settings(self) -> dict[str, Any]:
        """See `GenerationBody`; also Anthropic's budget, if there is no other."""
        given = super().given_settings()
        if isinstance(self.thinking, Thinking) and given.get("thinking_budget") is None:
            given["thinking_budget"] = self.thinking.budget_tokens
        return given

    def chat_of(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any],
        choice: str | None,
        is_parallel: bool | None,
        *,
        allowed: Sequence[Any] | None = None,
        effort: str | None = None,
        may_continue: bool = True,
    ) -> ChatPrompt:
        """The chat of some messages and tools. Raises: ErrorResponse: fields do not go together, or a tool is invalid.

        Args:
            tools, choice, is_parallel, allowed: see `tools_of`.
            effort: instead of `reasoning_effort`, for APIs that have it in a form of their own.
            may_continue: whether the answer may continue a last message of the assistant's if no field says so.
        """
        last, effort = messages[-1], effort or self.reasoning_effort
        problem = None
        if self.add_generation_prompt:
            problem = "cannot go together with add_generation_prompt: true, which begins a new message"
        elif last["role"] != "assistant":
            problem = f"needs a last message of the assistant's, got one of {last['role']!r}"
        elif last.get("tool_calls"):
            problem = "cannot continue a message with calls, which is complete"
        if self.continue_final_message and problem is not None:
            message = f"continue_final_message {problem}; leave it out"
            raise ErrorResponse(400, message, param="continue_final_message")
        continues = self.continue_final_message
        if continues is None:  # the default is llama.cpp's
            continues = may_continue and problem is None
        reasoning_field = "thinking" if self.thinking is not None else "reasoning_effort" if effort == "none" else None
        variables = self._variables(effort)
        try:
            checked = tools_of(tools, choice or "auto", is_parallel=is_parallel, allowed=allowed)
        except SettingsError as error:
            raise ErrorResponse(400, str(error), param="tools") from error
        return ChatPrompt(
            messages,
            continues=continues,
            variables=variables,
            reasoning_field=reasoning_field,
            predicted_text="" if self.prediction is None else joined(self.prediction.content),
            has_tools=bool(tools),
            tools=checked,
        )

    def _variables(self, effort: str | None) -> dict[str, Any]:
        """The variables of the chat template."""
        if taken := sorted(_NO_VARIABLES & (self.chat_template_kwargs or {}).keys()):
            message = f"chat_template_kwargs cannot have {taken[0]}, which is no variable of the template; leave it out"
            raise ErrorResponse(400, message, param="chat_template_kwargs")
        variables: dict[str, Any] = {} if self.add_generation_prompt is not False else {"add_generation_prompt": False}
        if effort == "none":
            variables["enable_thinking"] = False
        elif effort is not None:
            variables["reasoning_effort"] = effort
        if self.thinking is not None:
            is_on = self.thinking if isinstance(self.thinking, bool) else self.thinking.type != "disabled"
            variables["enable_thinking"] = is_on
        return {**variables, **(self.chat_template_kwargs or {})}


def label_of(tool: Any) -> str:
    """The type of a tool that is left out, and its name where the type does not say it."""
    type, name = _type_and_name(tool)
    return f"{type}.{name}" if isinstance(name, str) and name not in str(type) else str(type)


def check_choice(choice: Any, offered: Sequence[Any], left_out: Sequence[Any]) -> None:
    """Check a choice: "none", "auto", "required", or a tool's name or type.

    Raises: ErrorResponse: the call that it asks for would be one of a tool that is left out.
    """
    if choice in ("none", "auto") or any(choice in ("required", _type_and_name(tool)[1]) for tool in offered):
        return
    if asked := [tool for tool in left_out if choice == "required" or choice in _type_and_name(tool)]:
        raise ErrorResponse(
            400,
            f"{', '.join(map(label_of, asked))[:200]} cannot be called here, and tool_choice asks for it: the model "
            "calls functions, which the client runs; offer a function, or leave tool_choice out",
            param="tool_choice",
        )


def _type_and_name(tool: Any) -> tuple[Any, Any]:
    if not isinstance(tool, Mapping):
        return tool.type, tool.name
    inner = tool.get("function") or tool.get("custom")
    return tool.get("type"), tool.get("name") or (inner.get("name") if isinstance(inner, Mapping) else None)
