"""Anthropic's messages, and the number of their tokens: their operations."""

from __future__ import annotations

from functools import partial

from runtime.engine.runtime import Runtime
from runtime.server.answers.body import parse_request
from runtime.server.answers.endpoint import Endpoint, Parsed, TokenizerEndpoint, endings
from runtime.server.answers.preparation import encode_prompts
from runtime.server.answers.request import GenerationRequest
from runtime.server.anthropic.requests import MessagesRequest
from runtime.server.anthropic.serializer import ERRORS, AnthropicMessage, MessageSerializer, TokenCount
from runtime.server.operations import Operation

_CONVERSATION = {"messages": [{"role": "user", "content": "def quicksort(items):"}]}


def _message(body: bytes) -> Parsed:
    request = parse_request(MessagesRequest, body)
    request.check_last()
    return request.generation(), MessageSerializer


def _token_count(request: GenerationRequest, runtime: Runtime) -> TokenCount:
    (prompt,) = encode_prompts(request, runtime)
    return {"input_tokens": len(prompt)}


OPERATIONS = (
    Operation(
        "/v1/messages",
        lambda context: Endpoint(context, _message),
        "message",
        "Answer a conversation in the form of Anthropic's messages",
        AnthropicMessage,
        MessagesRequest,
        {**_CONVERSATION, "max_tokens": 32, "stream": True},
        is_streamed=True,
        errors=ERRORS,
    ),
    *endings("/v1/messages", "message", ERRORS),
    Operation(
        "/v1/messages/count_tokens",
        partial(TokenizerEndpoint, lambda body: parse_request(MessagesRequest, body).generation(), _token_count),
        "count_tokens",
        "Number of tokens of a conversation",
        TokenCount,
        MessagesRequest,
        _CONVERSATION,
        errors=ERRORS,
    ),
)
