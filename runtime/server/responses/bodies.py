"""Responses and events of `/v1/responses`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from runtime.server.answers.token_logprobs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


# --- output ---------------------------------------------------------------------------------------


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


# --- the response ---------------------------------------------------------------------------------


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

    reason: Literal["max_output_tokens"]


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


# --- events ---------------------------------------------------------------------------------------


def _event(name: str, about: str, /, *types: str, **fields: Any) -> Any:
    """The type of numbered events of some types, with further fields."""
    make: Any = TypedDict
    made = make(name, {"sequence_number": int, "type": Literal[tuple(f"response.{type}" for type in types)], **fields})
    made.__doc__ = about
    return made


_ITEM: dict[str, Any] = {"item_id": str, "output_index": int}
_PART: dict[str, Any] = {**_ITEM, "content_index": int}
_TEXT: dict[str, Any] = {**_PART, "logprobs": list[TokenLogprob]}
_WHOLE = ("created", "in_progress", "completed", "incomplete", "failed")

EVENTS: tuple[Any, ...] = (
    _event("ResponseEvent", "The response so far, when it begins and when it ends.", *_WHOLE, response=ResponseBody),
    _event(
        "ItemEvent",
        "An item of the output begins, or is complete.",
        "output_item.added",
        "output_item.done",
        output_index=int,
        item=OutputItem,
    ),
    _event(
        "PartEvent",
        "A part of an item's content begins, or is complete.",
        "content_part.added",
        "content_part.done",
        **_PART,
        part=OutputText | ReasoningContent,
    ),
    _event("TextDelta", "Further text of the answer.", "output_text.delta", **_TEXT, delta=str),
    _event("TextDone", "The whole text of the answer.", "output_text.done", **_TEXT, text=str),
    _event("ReasoningDelta", "Further text of the reasoning.", "reasoning_text.delta", **_PART, delta=str),
    _event("ReasoningDone", "The whole text of the reasoning.", "reasoning_text.done", **_PART, text=str),
    _event(
        "ArgumentsDelta", "Further text of a call's arguments.", "function_call_arguments.delta", **_ITEM, delta=str
    ),
    _event(
        "ArgumentsDone",
        "The whole text of a call's arguments.",
        "function_call_arguments.done",
        **_ITEM,
        name=str,
        arguments=str,
    ),
    _event("InputDelta", "The input of a call of a custom tool.", "custom_tool_call_input.delta", **_ITEM, delta=str),
    _event("InputDone", "The same, complete.", "custom_tool_call_input.done", **_ITEM, input=str),
)
