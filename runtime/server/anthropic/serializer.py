"""Answers in Anthropic's format: blocks of content, each begun, continued and stopped by events."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from protocol.statistics import Statistics
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.server.answers.api import BegunAnswer, Serializer, ServerSentEvent, end_reason
from runtime.server.errors import ErrorResponse
from runtime.server.operations import ErrorForm
from runtime.server.reports import ModelDescription

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


AnswerBlock = TextContentBlock | ThinkingContentBlock | ToolUseContentBlock


class AnthropicMessage(TypedDict):
    """A response of `/v1/messages`; in the first event of a stream, `content` is empty."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
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


ERRORS = ErrorForm(MessagesErrorBody, messages_error_body)


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


_Event = dict[str, Any]


class MessageSerializer(Serializer):
    """Serializer for `/v1/messages`. Each method that yields events changes the content, and the events say how."""

    id_header = b"request-id"

    def __init__(self, answer: BegunAnswer) -> None:
        super().__init__(answer)
        self.id = f"msg_{secrets.token_hex(16)}"
        self._content: list[AnswerBlock] = []
        self._index = -1  # of the last block that events have begun
        self._is_open = False

    def whole(self, tokens: Sequence[Token], statistics: Statistics) -> Mapping[str, Any]:
        for _ in self._added(tokens):
            pass
        return {**self._message(statistics), "content": self._content, **self._end()}

    def first_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        return [_event({"type": "message_start", "message": self._message(statistics)}), _event({"type": "ping"})]

    def events(self, tokens: Sequence[Token], statistics: Statistics) -> Sequence[ServerSentEvent]:
        return [_event(each) for each in self._added(tokens)]

    def idle_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        return [_event({"type": "ping"})]

    def last_events(self, statistics: Statistics) -> Sequence[ServerSentEvent]:
        return [
            *(_event(each) for each in self._stopped()),
            _event({"type": "message_delta", "delta": self._end(), "usage": _usage(statistics)}),
            _event({"type": "message_stop"}),
        ]

    def error_events(self, error: ErrorResponse) -> Sequence[ServerSentEvent]:
        return [ServerSentEvent(messages_error_body(error), "error")]

    def _message(self, statistics: Statistics) -> AnthropicMessage:
        """The message, without its content and its end."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(statistics),
        }

    def _end(self) -> dict[str, StopReason | str | None]:
        assert self._last_token is not None, "the last token of a stream has a finish reason"
        reason, stop = end_reason(self._last_token), self._last_token.stop_reason
        if reason != "stop":
            return {"stop_reason": "cancelled" if reason == "cancelled" else "max_tokens", "stop_sequence": None}
        # Only for a stop string: clients look for the text of the sequence, and a stop token has none.
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": "tool_use" if self._answer.splitter.has_calls else "end_turn", "stop_sequence": None}

    def _added(self, tokens: Sequence[Token]) -> Iterator[_Event]:
        for part in self._parts(tokens):
            match part:
                case Delta("call_began", call=ToolCall(id, name)):
                    yield from self._begun({"type": "tool_use", "id": id, "name": name, "input": {}})
                case Delta("call_arguments", text):
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
                case Delta("call_ended" | "call_broken" as kind, call=ToolCall() as call):
                    # The beginning of a JSON object is no input; the stop reason says that there was more.
                    if kind == "call_ended":
                        self._block["input"] = call.values
                    yield from self._stopped()
                case Delta("call_broken", given):
                    # Events cannot be taken back, but the block can.
                    yield from self._stopped()
                    self._content.pop()
                    yield from self._text("text", given)
                case Delta("reasoning", text):
                    yield from self._text("thinking", text)
                case Delta("content", text):
                    yield from self._text("text", text)

    def _text(self, kind: Literal["text", "thinking"], text: str) -> Iterator[_Event]:
        if not self._is_open or self._block["type"] != kind:
            thinking: ThinkingContentBlock = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._begun(thinking if kind == "thinking" else {"type": "text", "text": ""})
        self._block[kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begun(self, block: AnswerBlock) -> Iterator[_Event]:
        yield from self._stopped()
        self._index += 1
        self._is_open = True
        self._content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": copy.copy(block)}

    def _delta(self, delta: _Event) -> _Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stopped(self) -> Iterator[_Event]:
        if not self._is_open:
            return
        self._is_open = False
        if self._block["type"] == "thinking":
            # Clients wait for the signature before they keep the block.
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._index}

    @property
    def _block(self) -> Any:
        return self._content[-1]


def _usage(statistics: Statistics) -> MessagesUsage:
    return {
        "input_tokens": statistics.prompt_tokens - statistics.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": statistics.cached_tokens,
        "output_tokens": statistics.generated_tokens,
    }


def _event(data: _Event) -> ServerSentEvent:
    return ServerSentEvent(data, data["type"])
