"""OpenAI's completions and chats, and Mistral's fill-in-the-middle: their operations."""

from __future__ import annotations

from functools import partial

from runtime.server.answers.body import parse_request
from runtime.server.answers.endpoint import Endpoint, Parsed
from runtime.server.answers.running import endings
from runtime.server.openai.bodies import ChatCompletion, Completion
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest
from runtime.server.openai.serializers import ChatSerializer, CompletionSerializer
from runtime.server.operations import Operation


def _chat(body: bytes) -> Parsed:
    request = parse_request(ChatRequest, body)
    return request.generation(), partial(ChatSerializer, request)


def _completion(body: bytes) -> Parsed:
    request = parse_request(CompletionRequest, body)
    return request.generation(), partial(CompletionSerializer, request)


def _fill_in(body: bytes) -> Parsed:
    request = parse_request(FimRequest, body)
    return request.generation(fills_in=True), partial(ChatSerializer, request)


OPERATIONS = (
    Operation(
        "/v1/completions",
        lambda context: Endpoint(context, _completion),
        "complete",
        "Continue a text",
        Completion,
        "POST",
        CompletionRequest,
        {"prompt": "def quicksort(items):", "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    Operation(
        "/v1/fim/completions",
        lambda context: Endpoint(context, _fill_in),
        "fill_in",
        "Fill in the text between two texts",
        ChatCompletion,
        "POST",
        FimRequest,
        {"prompt": "def quicksort(items):", "suffix": "return items", "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    Operation(
        "/v1/chat/completions",
        lambda context: Endpoint(context, _chat),
        "chat",
        "Answer a chat",
        ChatCompletion,
        "POST",
        ChatRequest,
        {"messages": [{"role": "user", "content": "def quicksort(items):"}], "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    *endings("/v1/completions", "completion"),
    *endings("/v1/chat/completions", "chat"),
)
