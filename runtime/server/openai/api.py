"""OpenAI's completions and chats, Mistral's fill-in-the-middle, and vLLM's token ids of texts and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from runtime.engine.runtime import Runtime
from runtime.generation.text import encode_prompt, tokenized
from runtime.server.answers.body import parse_request
from runtime.server.answers.endpoint import Endpoint, Parsed, TextBody, TokenizerEndpoint, endings
from runtime.server.answers.preparation import encode_prompts
from runtime.server.answers.request import GenerationRequest, Ids
from runtime.server.context import ServerContext
from runtime.server.errors import ErrorResponse
from runtime.server.models.loaded_model import tokenizer_of
from runtime.server.openai.requests import ChatRequest, CompletionRequest, FimRequest
from runtime.server.openai.serializers import ChatCompletion, ChatSerializer, CompletionSerializer, TextCompletion
from runtime.server.operations import Operation


class TokenizeRequest(TextBody):
    """The body of a request to `/v1/tokenize`: a text as `prompt`, or a chat as `messages`."""

    prompt_field = "prompt"
    prompt: str | None = Field(None, description="a text")
    add_special_tokens: bool | None = Field(None, description="whether special tokens are added; by default they are")
    return_token_strs: bool | None = Field(None, description="return the text of each token as `token_strs`")
    messages: Any = Field(None, description="a chat; other fields are those of `/v1/chat/completions`")


class DetokenizeRequest(TextBody):
    """The body of a request to `/v1/detokenize`: token ids."""

    prompt_field = "tokens"
    tokens: Ids


class Tokenized(TypedDict):
    """Token ids of a text or a chat, their number, and the length of the model's context (null if unknown)."""

    tokens: list[int]
    count: int
    max_model_len: int | None
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of token ids."""

    prompt: str


def _parse_tokenize(body: bytes) -> TokenizeRequest | GenerationRequest:
    request = parse_request(TokenizeRequest, body)
    if (request.prompt is None) == (request.messages is None):
        raise ErrorResponse(400, "the body must have one of prompt and messages", param="prompt")
    return request if request.messages is None else parse_request(ChatRequest, body).generation()


def _tokenized(body: TokenizeRequest | GenerationRequest, runtime: Runtime) -> Tokenized:
    tokenizer = tokenizer_of(runtime)
    if isinstance(body, GenerationRequest):
        tokens = list(encode_prompts(body, runtime)[0])
    else:
        tokens = list(tokenized(body.prompt or "", tokenizer, add_special_tokens=body.add_special_tokens is not False))
    result: Tokenized = {"tokens": tokens, "count": len(tokens), "max_model_len": runtime.context_length}
    if isinstance(body, TokenizeRequest) and body.return_token_strs:
        result["token_strs"] = [tokenizer.decode([token]) for token in tokens]
    return result


def _detokenized(body: DetokenizeRequest, runtime: Runtime) -> Detokenized:
    # Checks only that the vocabulary has the ids: there may be more of them than the context holds.
    ids = encode_prompt(body.tokens, None, runtime.vocab_size) if body.tokens else ()
    return {"prompt": tokenizer_of(runtime).decode(list(ids)) if ids else ""}


def _endpoint(
    body_type: type[ChatRequest | CompletionRequest], serializer: type[ChatSerializer | CompletionSerializer]
) -> Callable[[ServerContext], Endpoint]:
    def parse(body: bytes) -> Parsed:
        request = parse_request(body_type, body)
        return request.generation(), partial(serializer, request)

    return lambda context: Endpoint(context, parse)


OPERATIONS = (
    Operation(
        "/v1/completions",
        _endpoint(CompletionRequest, CompletionSerializer),
        "complete",
        "Continue a text",
        TextCompletion,
        CompletionRequest,
        {"prompt": "def quicksort(items):", "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    Operation(
        "/v1/fim/completions",
        _endpoint(FimRequest, ChatSerializer),
        "fill_in",
        "Fill in the text between two texts",
        ChatCompletion,
        FimRequest,
        {"prompt": "def quicksort(items):", "suffix": "return items", "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    Operation(
        "/v1/chat/completions",
        _endpoint(ChatRequest, ChatSerializer),
        "chat",
        "Answer a chat",
        ChatCompletion,
        ChatRequest,
        {"messages": [{"role": "user", "content": "def quicksort(items):"}], "max_tokens": 32, "stream": True},
        is_streamed=True,
    ),
    *endings("/v1/completions", "completion"),
    *endings("/v1/chat/completions", "chat"),
    Operation(
        "/v1/tokenize",
        partial(TokenizerEndpoint, _parse_tokenize, _tokenized),
        "tokenize",
        "The token ids of a text or a chat",
        Tokenized,
        TokenizeRequest,
        {"prompt": "def quicksort(items):"},
    ),
    Operation(
        "/v1/detokenize",
        partial(TokenizerEndpoint, partial(parse_request, DetokenizeRequest), _detokenized),
        "detokenize",
        "The text of token ids",
        Detokenized,
        DetokenizeRequest,
        {"tokens": [1, 2, 3]},
    ),
)
