"""OpenAI's completions and chats, and Mistral's fill-in-the-middle: their operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from runtime.server.answers.api import Answer, Api, Serializer
from runtime.server.answers.body import parse_request
from runtime.server.answers.endpoint import Endpoint
from runtime.server.openai.bodies import ChatChunk, ChatCompletion, Completion
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest, OpenAIRequest
from runtime.server.openai.serializers import (
    ChatSerializer,
    CompletionSerializer,
    last_events_of_choices,
    whole_of_choices,
)
from runtime.server.operations import COMMON_ERRORS, Events, Operation

R = TypeVar("R", bound=OpenAIRequest)


def _api(request_type: type[R], serializer: Callable[[Any, Answer], Serializer]) -> Api[R]:
    parse = partial(parse_request, request_type)
    return Api(parse, lambda body: body, serializer, whole_of_choices, last_events_of_choices)


_CHAT_EVENTS = Events((ChatChunk, COMMON_ERRORS.type), are_named=False)

COMPLETIONS = Operation(
    "/v1/completions",
    lambda context: Endpoint(context, _api(CompletionRequest, CompletionSerializer)),
    "complete",
    "Continue a text",
    Completion,
    "POST",
    CompletionRequest,
    {"prompt": "def quicksort(items):", "max_tokens": 32, "stream": True},
    Events((Completion, COMMON_ERRORS.type), are_named=False),
)
FIM = Operation(
    "/v1/fim/completions",
    lambda context: Endpoint(context, _api(FimRequest, ChatSerializer)),
    "fill_in",
    "Write what stands between two texts",
    ChatCompletion,
    "POST",
    FimRequest,
    {"prompt": "def quicksort(items):", "suffix": "return items", "max_tokens": 32, "stream": True},
    _CHAT_EVENTS,
)
CHATS = Operation(
    "/v1/chat/completions",
    lambda context: Endpoint(context, _api(ChatRequest, ChatSerializer)),
    "chat",
    "Answer a chat",
    ChatCompletion,
    "POST",
    ChatRequest,
    {"messages": [{"role": "user", "content": "def quicksort(items):"}], "max_tokens": 32, "stream": True},
    _CHAT_EVENTS,
)
OPERATIONS = (COMPLETIONS, FIM, CHATS)
