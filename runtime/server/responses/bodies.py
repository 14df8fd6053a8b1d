"""Responses and events of `/v1/responses`; see `runtime.server.openai.bodies` for why these types."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from runtime.server.answers.token_logprobs import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


# --- output ---------------------------------------------------------------------------------------


class OutputText(TypedDict):
    """Text of the answer; `logprobs` of its tokens, if the request includes them."""

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
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


# --- the response ---------------------------------------------------------------------------------


class InputDetails(TypedDict):
    """Prompt tokens that were still cached."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    """Answer tokens that are reasoning."""

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
    """A response of `/v1/responses`; settings of the request are given back as they were sent, `usage` at the end."""

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


class _Numbered(TypedDict):
    sequence_number: int


class _OfItem(_Numbered):
    item_id: str
    output_index: int


class _OfPart(_OfItem):
    content_index: int


class ResponseEvent(_Numbered):
    """The response as it is: at the beginning, and at its end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseBody


class ItemEvent(_Numbered):
    """An item of the output begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(_OfPart):
    """A part of an item's content begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningContent


class TextDelta(_OfPart):
    """Further text of the answer."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfPart):
    """The whole text of the answer."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfPart):
    """Further text of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(_OfPart):
    """The whole text of the reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_OfItem):
    """Further text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    """The whole text of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


_TextEvent = TextDelta | TextDone | ReasoningDelta | ReasoningDone
ResponsesEvent = ResponseEvent | ItemEvent | PartEvent | _TextEvent | ArgumentsDelta | ArgumentsDone
