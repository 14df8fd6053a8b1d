"""OpenAI's completions and chats, and Mistral's fill-in-the-middle: their operations."""

from __future__ import annotations

from functools import partial

from runtime.server.answers.body import parse_request
from runtime.server.answers.endpoint import Endpoint
from runtime.server.openai.bodies import ChatChunk, ChatCompletion, Completion
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest
from runtime.server.openai.serializers import ChatSerializer, CompletionSerializer
from runtime.server.operations import COMMON_ERRORS, Events, Operation

_CHAT_EVENTS = Events((ChatChunk, COMMON_ERRORS.type), are_named=False)

OPERATIONS = (
    Operation(
        "/v1/completions",
        lambda context: Endpoint(context, partial(parse_request, CompletionRequest), CompletionSerializer),
        "complete",
        "Continue a text",
        Completion,
        "POST",
        CompletionRequest,
        {"prompt": "def quicksort(items):", "max_tokens": 32, "stream": True},
        Events((Completion, COMMON_ERRORS.type), are_named=False),
    ),
    Operation(
        "/v1/fim/completions",
        lambda context: Endpoint(context, partial(parse_request, FimRequest), ChatSerializer),
        "fill_in",
        "Fill in the text between two texts",
        ChatCompletion,
        "POST",
        FimRequest,
        {"prompt": "def quicksort(items):", "suffix": "return items", "max_tokens": 32, "stream": True},
        _CHAT_EVENTS,
    ),
    Operation(
        "/v1/chat/completions",
        lambda context: Endpoint(context, partial(parse_request, ChatRequest), ChatSerializer),
        "chat",
        "Answer a chat",
        ChatCompletion,
        "POST",
        ChatRequest,
        {"messages": [{"role": "user", "content": "def quicksort(items):"}], "max_tokens": 32, "stream": True},
        _CHAT_EVENTS,
    ),
)
