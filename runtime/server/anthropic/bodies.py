"""Response bodies in Anthropic's format."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from runtime.server.errors import ErrorResponse
from runtime.server.models.reports import ModelDescription

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "cancelled"]

ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]


class MessagesErrorDetail(TypedDict):
    """An error: its type for programs, a message for people."""

    type: ErrorType
    message: str


class MessagesErrorBody(TypedDict):
    """The body of every response of this API with a status of 400 or more, and the event that ends a failed answer."""

    type: Literal["error"]
    error: MessagesErrorDetail


class TokenCount(TypedDict):
    """Number of tokens of a conversation."""

    input_tokens: int


class MessagesUsage(TypedDict):
    """Token counts: of the prompt's uncached part (`input_tokens`), of its cached part, and of the answer."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextContentBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingContentBlock(TypedDict):
    """Reasoning before the answer. Anthropic signs it; here the signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUseContentBlock(TypedDict):
    """A call of a tool; in the event that starts the block, `input` is empty."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContentBlock | ThinkingContentBlock | ToolUseContentBlock


class AnthropicMessage(TypedDict):
    """A response of `/v1/messages`; in the first event of a stream, `content` is empty."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


_TYPES: dict[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def messages_error_body(error: ErrorResponse) -> MessagesErrorBody:
    """The body of an error response."""
    type = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": type, "message": error.detail["message"]}}


class AnthropicModel(TypedDict):
    """A served model; `max_input_tokens`, the length of its context, is null until it has been loaded."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None


class AnthropicModelList(TypedDict):
    """The served models, all of them on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str
    last_id: str


def model_of(described: ModelDescription) -> AnthropicModel:
    """The description of a model in this form."""
    return {
        "type": "model",
        "id": described["id"],
        "display_name": described["id"],
        "created_at": datetime.fromtimestamp(described["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": described["max_model_len"],
    }


def models_of(described: Sequence[ModelDescription]) -> AnthropicModelList:
    """The list of the models in this form; there is at least one."""
    data = list(map(model_of, described))
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
