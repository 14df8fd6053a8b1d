"""The body of a request to `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from runtime.server.answers.body import Body, NoEffect
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests.field_types import MaxTokens, Objects
from runtime.server.openai.requests.messages import Message, TextPart, joined
from runtime.server.openai.requests.request import Request


class Thinking(Body):
    """Whether the model reasons before it answers, in Anthropic's form."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: NoEffect = None


class Prediction(Body):
    """A text that the answer may resemble, such as a file that is edited."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)]


# What `apply_chat_template` takes beside variables of the template. A template is a program, and is the model's own.
_NO_VARIABLES = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)


class ChatRequest(Request):
    """The body of a request to `/v1/chat/completions`: a chat to continue."""

    prompt_field = "messages"
    # The bounds of lists of objects are for the time of reading them.
    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name for `max_tokens`")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Objects | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='"none", "auto", "required", or the function that must be called'
    )
    parallel_tool_calls: bool | None = Field(
        None,
        description="whether an answer may have several calls; by default only where the model decides whether to call",
    )
    reasoning_effort: Annotated[str, Field(max_length=100)] | None = Field(
        None, description='a variable of the chat template; "none" switches reasoning off, if the template can'
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
        description="true: the answer continues the last message; false: it is a new one; by default, it continues a "
        "message of the assistant's without calls",
    )
    add_generation_prompt: bool | None = Field(
        None, description="true: the answer is a new message; false: the prompt ends with the last message"
    )
    prediction: Prediction | None = Field(None, description="a text that the answer may resemble, to draft from")
    functions: Objects | None = Field(None, description="OpenAI's older form of `tools`")
    function_call: str | dict[str, Any] | None = Field(None, description="OpenAI's older form of `tool_choice`")

    def check(self) -> None:
        super().check()
        if self.top_logprobs and self.logprobs is None:
            raise ErrorResponse(400, "top_logprobs needs logprobs: true; add it or leave it out", param="top_logprobs")
        if self.continue_final_message:
            self._check_continued()
        if taken := sorted(_NO_VARIABLES & (self.chat_template_kwargs or {}).keys()):
            message = f"chat_template_kwargs cannot have {taken[0]}, which is no variable of the template; leave it out"
            raise ErrorResponse(400, message, param="chat_template_kwargs")

    def _check_continued(self) -> None:
        """Check that the last message can be continued, as the request wants it.

        Raises: ErrorResponse: it cannot.
        """
        last, problem = self.messages[-1], None
        if self.add_generation_prompt:
            problem = "cannot go together with add_generation_prompt: true, which begins a new message"
        elif last.role != "assistant":
            problem = f"needs a last message of the assistant's, got one of {last.role!r}"
        elif last.has_calls:
            problem = "cannot continue a message with calls, which is complete"
        if problem is not None:
            message = f"continue_final_message {problem}; leave it out"
            raise ErrorResponse(400, message, param="continue_final_message")

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message; the default is llama.cpp's."""
        last = self.messages[-1]
        if self.continue_final_message is not None:
            return self.continue_final_message
        can_go_on = last.role == "assistant" and last.prefix is not False and not last.has_calls
        return can_go_on and not self.add_generation_prompt

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
    def predicted_text(self) -> str:
        return "" if self.prediction is None else joined(self.prediction.content)

    @property
    def has_functions(self) -> bool:
        """Whether the request has the older form of tools, in which the answer is sent then."""
        return self.functions is not None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_length(self) -> int:
        return sum(len(message.plain()["content"]) for message in self.messages)

    @property
    def max_answer_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_answer_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
