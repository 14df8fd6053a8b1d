"""Anthropic's messages, and the number of their tokens: their operations."""

from __future__ import annotations

import typing
from functools import partial

from runtime.engine.runtime import Runtime
from runtime.server.answers.chat import Chat
from runtime.server.answers.endpoint import Endpoint, TokenizerEndpoint
from runtime.server.answers.preparation import encode_prompts
from runtime.server.anthropic.bodies import (
    AnthropicMessage,
    MessagesErrorBody,
    MessagesEvent,
    TokenCount,
    messages_error_body,
)
from runtime.server.anthropic.requests import MessagesRequest, TokenCountRequest, parse_chat
from runtime.server.anthropic.serializer import MessageSerializer
from runtime.server.operations import ErrorForm, Events, Operation

_ERRORS = ErrorForm(MessagesErrorBody, messages_error_body)
_CONVERSATION = {"messages": [{"role": "user", "content": "def quicksort(items):"}]}


def _token_count(chat: Chat, runtime: Runtime) -> TokenCount:
    (prompt,) = encode_prompts(chat, runtime)
    return {"input_tokens": len(prompt)}


OPERATIONS = (
    Operation(
        "/v1/messages",
        lambda context: Endpoint(context, partial(parse_chat, MessagesRequest), MessageSerializer),
        "message",
        "Answer a conversation in the form of Anthropic's messages",
        AnthropicMessage,
        "POST",
        MessagesRequest,
        {**_CONVERSATION, "max_tokens": 32, "stream": True},
        Events((*typing.get_args(MessagesEvent), MessagesErrorBody), are_named=True),
        _ERRORS,
    ),
    Operation(
        "/v1/messages/count_tokens",
        lambda context: TokenizerEndpoint(
            context,
            partial(parse_chat, TokenCountRequest),
            _token_count,
            lambda chat: (chat.prompt_field, chat.prompt_length),
        ),
        "count_tokens",
        "Number of tokens of a conversation",
        TokenCount,
        "POST",
        TokenCountRequest,
        _CONVERSATION,
        errors=_ERRORS,
    ),
)
