"""The APIs of the server that answer conversations, so that one test tells what holds in each."""

from collections.abc import Callable
from typing import Any

import attrs
from asgi import CHAT, HELLO, MESSAGES, RESPONSES, Exchange
from sweeps import sweep

from protocol.statistics import Statistics
from runtime.server.anthropic.serializer import AnthropicMessage
from runtime.server.openai.serializers import ChatCompletion
from runtime.server.responses.serializer import ResponseBody

NUM_TOKENS = 20


@attrs.frozen
class Api:
    """An API of conversations.

    Attributes:
        asked: asks for `NUM_TOKENS` tokens.
        length, stop: the fields with the maximum number of tokens and with stop strings.
        kind: the type of a body.
        prefix: the beginning of its id.
        usage: the usage that statistics stand for.
        end: why the answer of a body has ended, and what stands there for one that is cut off, and for a whole one.
        delta: is in the event of a text.
        error: the error of an answer, whole or streamed: its message, and what tells programs of it.
    """

    path: str
    asked: dict[str, Any]
    length: str
    stop: str
    kind: Any
    prefix: str
    usage: Callable[[Statistics], dict[str, Any]]
    end: Callable[[Any], str]
    ends: tuple[str, str]
    delta: bytes
    error: Callable[[Exchange], tuple[str, str]]


def _chat_usage(statistics: Statistics) -> dict[str, Any]:
    return {
        "prompt_tokens": statistics.prompt_tokens,
        "completion_tokens": NUM_TOKENS,
        "total_tokens": statistics.prompt_tokens + NUM_TOKENS,
        "proposed_tokens": statistics.proposed,
        "accepted_tokens": statistics.accepted,
        "accepted_copied_tokens": statistics.accepted_copied,
        "rejected_copied_tokens": statistics.rejected_copied,
        "accepted_grammar_tokens": statistics.accepted_grammar,
        "rejected_grammar_tokens": statistics.rejected_grammar,
        "prompt_tokens_details": {"cached_tokens": statistics.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": statistics.accepted,
            "rejected_prediction_tokens": statistics.rejected,
        },
    }


def _response_usage(statistics: Statistics) -> dict[str, Any]:
    return {
        "input_tokens": statistics.prompt_tokens,
        "input_tokens_details": {"cached_tokens": statistics.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": NUM_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": statistics.prompt_tokens + NUM_TOKENS,
    }


def _message_usage(statistics: Statistics) -> dict[str, Any]:
    return {
        "input_tokens": statistics.prompt_tokens - statistics.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": statistics.cached_tokens,
        "output_tokens": NUM_TOKENS,
    }


def is_streamed(answer: Exchange) -> bool:
    return answer.headers["content-type"].startswith("text/event-stream")


def _chat_error(answer: Exchange) -> tuple[str, str]:
    error = answer.events[-1]["error"] if is_streamed(answer) else answer.fault
    return error["message"], error["code"]


def _response_error(answer: Exchange) -> tuple[str, str]:
    if not is_streamed(answer):
        return answer.fault["message"], answer.fault["code"]
    last = answer.named_events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    # OpenAI's clients know no other code for it.
    assert last["response"]["error"]["code"] == "server_error"
    return last["response"]["error"]["message"], "models_unavailable"


def _message_error(answer: Exchange) -> tuple[str, str]:
    body = answer.named_events[-1] if is_streamed(answer) else answer.json
    assert (body["type"], set(body)) == ("error", {"type", "error"})
    return body["error"]["message"], body["error"]["type"]


APIS = {
    "chat": Api(
        CHAT,
        {**HELLO, "max_tokens": NUM_TOKENS},
        "max_tokens",
        "stop",
        ChatCompletion,
        "chatcmpl-",
        _chat_usage,
        lambda body: body["choices"][0]["finish_reason"],
        ("length", "stop"),
        b'"content":',
        _chat_error,
    ),
    "responses": Api(
        RESPONSES,
        {"input": "hello", "max_output_tokens": NUM_TOKENS},
        "max_output_tokens",
        "stop",
        ResponseBody,
        "resp_",
        _response_usage,
        lambda body: body["status"],
        ("incomplete", "completed"),
        b"output_text.delta",
        _response_error,
    ),
    "messages": Api(
        MESSAGES,
        {**HELLO, "max_tokens": NUM_TOKENS},
        "max_tokens",
        "stop_sequences",
        AnthropicMessage,
        "msg_",
        _message_usage,
        lambda body: body["stop_reason"],
        ("max_tokens", "end_turn"),
        b"text_delta",
        _message_error,
    ),
}
EACH = sweep("api", APIS.values())
