"""The bodies of requests for chats, completions and fill-in-the-middle, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

from runtime.server.answers.body import Body, NoEffect, SentBack
from runtime.server.answers.chat import ChatBody, call_of, check_choice, custom_arguments, label_of
from runtime.server.answers.content import Content, as_text_or_parts, check_asked, joined, line_of, reasoning_in
from runtime.server.answers.request import (
    GenerationBody,
    GenerationRequest,
    Ids,
    MaxTokens,
    Objects,
    ResponseFormat,
    format_constraint,
)
from runtime.server.errors import ErrorResponse, short_json

# Most answers of one request, to all of its prompts.
MAX_ANSWERS = 128

_ListOfTexts = Annotated[list[str], Field(max_length=128, fail_fast=True)]
_ListOfIds = Annotated[list[Ids], Field(max_length=128, fail_fast=True)]
_NumTop = Annotated[int, Field(ge=0, le=20)]


class StreamOptions(Body):
    """Options of a streamed response.

    Attributes:
        include_usage: add a last chunk with the usage.
        continuous_usage_stats: add the usage so far to each chunk, unless `include_usage` is false.
        include_obfuscation: OpenAI's option; it has no effect, since chunks are never padded.
        include_speculation: add to each chunk its tokens, which of them the drafter proposed, the statistics so far,
            and what the models did; send at least four chunks a second, also while the prompt is read.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: NoEffect = None
    include_speculation: bool | None = None


# The id of the one call of a message in the older form, which has no ids; the newer form needs one.
_OLD_CALL_ID = "call_0"


def _content(value: Any, info: ValidationInfo) -> Any:
    return as_text_or_parts(value) if info.data.get("role") in ("tool", "function") else value


class MessageBody(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[Content | None, BeforeValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="another name of `reasoning_content`")
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    prefix: bool | None = Field(
        None, description="Mistral's field: whether the answer continues this message, if it is the last one"
    )
    refusal: SentBack = None
    audio: SentBack = None
    annotations: SentBack = None

    @property
    def _other_calls(self) -> list[str]:
        return [str(call["type"]) for call in self.tool_calls or () if not _can_be_read(call)]

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; also the types of calls that are none of functions."""
        yield from super().ignored_names()
        yield from ((f"tool_calls.{type}", False) for type in self._other_calls)

    def plain(self) -> dict[str, Any]:
        """The message for a chat template, with calls and results in the newer form, which templates know."""
        # "developer" is OpenAI's newer name for "system"; chat templates do not know it.
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        plain: dict[str, Any] = {"role": role, "content": joined(self.content or "", is_system=role == "system")}
        if reasoning := self.reasoning_content or self.reasoning or reasoning_in(self.content):
            plain["reasoning_content"] = reasoning
        calls = [_plain_call(call) for call in self.tool_calls or () if _can_be_read(call)]
        if self.function_call is not None and not self.tool_calls:
            calls = [{"id": _OLD_CALL_ID, "type": "function", "function": self.function_call}]
        if calls:
            plain["tool_calls"] = calls
        for type in self._other_calls:
            plain["content"] = f"{plain['content']}\n{line_of(type)}".lstrip("\n")
        if role == "tool":
            id = self.tool_call_id or (_OLD_CALL_ID if self.role == "function" else None)
            result = {"tool_call_id": id, "name": self.name}
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
        case {"function": {"name": str(name), "arguments": str(text), **others}} if "\\u" in text:
            function = call_of("", name, text)["function"]
            return {**call, "function": {**others, **function}}
    return call


def _is_callable(tool: Any) -> bool:
    """Whether a tool is a function; one of no known form counts as a function, and is refused later."""
    return not isinstance(tool, dict) or tool.get("type", "function") == "function"


def _choice(choice: Any) -> tuple[str, list[Any] | None]:
    """The choice of a tool as a word or a name, and the names of the tools that are allowed, if not all are."""
    if isinstance(choice, dict) and set(choice) == {"type"}:
        choice = choice["type"]
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            tools = [tool for tool in tools if _is_callable(tool)]
            return mode, [
                (tool.get("function") or tool).get("name") if isinstance(tool, dict) else tool for tool in tools
            ]
        case {"function": {"name": str(name)}} | {"custom": {"name": str(name)}} | {"name": str(name)}:
            return name, None
        case None:
            return "auto", None
        case str():
            return "required" if choice == "any" else choice, None  # "any" is Mistral's name
    raise _error(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": "…"}} or '
        f'{{"type": "allowed_tools", "allowed_tools": {{"mode": "auto", "tools": […]}}}}, got {short_json(choice)}',
        "tool_choice",
    )


class OpenAIBody(GenerationBody):
    """The fields that requests for chats and completions share."""

    max_tokens: MaxTokens | None = Field(
        None,
        description="maximum number of tokens in the answer, -1 for as many as fit into the context, 0 to read the "
        "prompt only",
    )
    n: Annotated[int, Field(ge=1, le=16)] | None = Field(
        None, description="number of answers, which are generated side by side"
    )
    response_format: ResponseFormat | None = None
    prompt_logprobs: _NumTop | None = Field(
        None,
        description="vLLM's field: return the log-probability of each token of the prompt, and those of this many of "
        "the most probable tokens at its position",
    )
    stream_options: StreamOptions | None = None
    user: NoEffect = None
    metadata: NoEffect = None
    store: NoEffect = None
    service_tier: NoEffect = None
    prompt_cache_key: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_retention: NoEffect = None

    def openai_request(self, *, num_logprobs: int | None, **more: Any) -> GenerationRequest:
        """As `request_of`, with these fields. Raises: ErrorResponse: fields do not go together."""
        request = self.request_of(
            format=format_constraint(self.response_format),
            num_choices=self.n or 1,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=self.prompt_logprobs,
            **more,
        )
        if self.stream_options is not None and not self.stream:
            raise _error("stream_options need stream: true; add it or leave them out", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise _error("prompt_logprobs are not for streams; leave one of them out", "prompt_logprobs")
        if self.stream_options is not None and self.stream_options.include_speculation:
            if request.num_answers > 1:
                raise _error("include_speculation is for one answer; leave it out, or ask for one", "stream_options")
            if request.max_tokens == 0:
                message = "include_speculation is for an answer, and max_tokens: 0 asks for none; leave one out"
                raise _error(message, "stream_options")
        return request


class ChatRequest(ChatBody, OpenAIBody):
    """The body of a request to `/v1/chat/completions`: a chat to continue."""

    # Lists of objects are bounded for the time that it takes to read them.
    messages: list[MessageBody] = Field(min_length=1, max_length=10_000, fail_fast=True)
    max_completion_tokens: MaxTokens | None = Field(None, description="OpenAI's newer name for `max_tokens`")
    tools: Objects | None = Field(None, description="functions that the model may call")
    tool_choice: str | dict[str, Any] | None = Field(
        None, description='"none", "auto", "required", the function that must be called, or the tools that may be'
    )
    parallel_tool_calls: bool | None = Field(
        None, description='whether an answer may have several tool calls; by default, only if `tool_choice` is "auto"'
    )
    logprobs: bool | None = None
    top_logprobs: _NumTop | None = None

    def ignored_names(self) -> Iterator[tuple[str, bool]]:
        """See `Body`; also the tools that are left out."""
        yield from super().ignored_names()
        yield from ((f"tools.{label_of(tool)}", False) for tool in self.tools or () if not _is_callable(tool))

    def generation(self) -> GenerationRequest:
        """The request in the form of no API. Raises: ErrorResponse: fields do not go together."""
        check_asked(self.messages, "messages", lambda message: message.role in ("tool", "function"))
        if self.top_logprobs and self.logprobs is None:
            raise _error("top_logprobs needs logprobs: true; add it or leave it out", "top_logprobs")
        is_newer = self.max_completion_tokens is not None
        messages, last = [message.plain() for message in self.messages], self.messages[-1]
        may_continue = last.prefix is not False and not last.tool_calls and not last.function_call
        choice, allowed = _choice(self.tool_choice)
        offered = [tool for tool in self.tools or () if _is_callable(tool)]
        check_choice(choice, offered, [tool for tool in self.tools or () if not _is_callable(tool)])
        is_parallel = self.parallel_tool_calls
        chat = self.chat_of(messages, offered, choice, is_parallel, allowed=allowed, may_continue=may_continue)
        return self.openai_request(
            prompt_field="messages",
            chat=chat,
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=self.max_completion_tokens if is_newer else self.max_tokens,
            max_tokens_field="max_completion_tokens" if is_newer else "max_tokens",
        )


class CompletionRequest(OpenAIBody):
    """The body of a request to `/v1/completions`: a text to continue, or several."""

    prompt: str | Ids | _ListOfTexts | _ListOfIds = Field(
        description="a text or a list of token ids; for several prompts, a list of texts or of lists of token ids"
    )
    suffix: str | None = Field(
        None, description="the text after the answer, for models that were trained to fill in the middle"
    )
    echo: bool | None = Field(
        None, description="begin the answer with the prompt, and with its log-probabilities if `logprobs` is set"
    )
    logprobs: _NumTop | None = None

    _no_suffix: ClassVar[str | None] = None  # what a missing or empty suffix stands for

    def generation(self) -> GenerationRequest:
        """The request in the form of no API. Raises: ErrorResponse: fields do not go together."""
        texts: Any = self.prompt
        if not (isinstance(texts, list) and texts and isinstance(texts[0], (str, list))):
            texts = [texts]
        suffix = self.suffix or self._no_suffix
        request = self.openai_request(
            prompt_field="prompt",
            texts=texts,
            suffix=suffix,
            echoes=bool(self.echo),
            num_logprobs=self.logprobs,
            max_tokens=self.max_tokens,
        )
        if request.num_answers > MAX_ANSWERS:
            raise _error(
                f"{len(request.texts)} prompts with {request.num_choices} texts each are too many: a request has at "
                f"most {MAX_ANSWERS}; send several requests",
                "prompt",
            )
        if suffix is not None and self.echo:
            raise _error("echo gives a prompt that is continued, and this one has a suffix; leave one out", "echo")
        if suffix is not None and not all(isinstance(prompt, str) for prompt in request.texts):
            raise _error("a suffix needs prompts that are texts, not token ids", "suffix")
        return request


class FimRequest(CompletionRequest):
    """The body of a request to `/v1/fim/completions`, in Mistral's form: fill in between `prompt` and `suffix`."""

    prompt: str
    # The answer is written in front of the suffix even if that is empty.
    _no_suffix: ClassVar[str | None] = ""


def _error(message: str, param: str) -> ErrorResponse:
    return ErrorResponse(400, message, param=param)
