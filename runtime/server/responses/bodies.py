"""Responses of `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from runtime.server.answers.token_logprobs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    """Text of the answer; `logprobs` is empty unless the request includes them."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class ReasoningContent(TypedDict):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessage(TypedDict):
    """The answer."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(TypedDict):
    """The reasoning before the answer."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningContent]


class OutputFunctionCall(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class OutputCustomCall(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


class ShellAction(TypedDict):
    """A command for the shell on the client's machine."""

    type: Literal["exec"]
    command: list[str]
    env: dict[str, str]
    working_directory: NotRequired[str | None]
    timeout_ms: NotRequired[int | None]
    user: NotRequired[str | None]


class OutputShellCall(TypedDict):
    """A call of the shell on the client's machine."""

    id: str
    type: Literal["local_shell_call"]
    status: ItemStatus
    call_id: str
    action: ShellAction


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall | OutputShellCall


class InputDetails(TypedDict):
    """Number of prompt tokens that were already cached."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Number of answer tokens that are reasoning."""

    reasoning_tokens: int


class ResponsesUsage(TypedDict):
    """Token counts of a request and its answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why the answer was cut off."""

    reason: Literal["max_output_tokens", "cancelled"]


class ResponseFailure(TypedDict):
    """Why the generation failed."""

    code: str
    message: str


class ResponseBody(TypedDict):
    """A response of `/v1/responses`, with settings of the request as they were sent; `usage` comes at the end."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: NotRequired[ResponsesUsage]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    background: Literal[False]
    user: NotRequired[str]


class DeletedResponse(TypedDict):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
