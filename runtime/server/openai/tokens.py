"""Token ids of texts and chats, and back, in the forms of vLLM and llama.cpp: `/v1/tokenize`, `/v1/detokenize`."""

from __future__ import annotations

from typing import Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from runtime.engine.runtime import Runtime
from runtime.generation.text import encode_prompt, tokenized
from runtime.server.answers.body import NoEffect, RequestBody, parse_request
from runtime.server.answers.endpoint import TokenizerEndpoint
from runtime.server.answers.preparation import encode_prompts
from runtime.server.answers.request import GenerationRequest
from runtime.server.answers.setting_fields import Ids
from runtime.server.answers.token_logprobs import token_bytes
from runtime.server.errors import ErrorResponse
from runtime.server.models.loaded_model import tokenizer_of
from runtime.server.openai.requests import ChatRequest
from runtime.server.operations import Operation


class TokenizeRequest(RequestBody):
    """The body of a request to `/v1/tokenize`: a text as `prompt` or `content`, or a chat as `messages`."""

    prompt: str | None = Field(None, description="a text; by default, special tokens are added")
    content: str | None = Field(None, description="a text; by default, no special tokens are added")
    add_special_tokens: bool | None = Field(None, description="whether to add special tokens; also `add_special`")
    add_special: bool | None = None
    parse_special: NoEffect = None
    return_token_strs: bool | None = Field(None, description="return the text of each token as `token_strs`")
    with_pieces: bool | None = Field(
        None, description="return each token as an object with its text, or its bytes if they are not whole characters"
    )
    messages: Any = Field(None, description="a chat; other fields are those of `/v1/chat/completions`")

    @property
    def text(self) -> str:
        """The text."""
        return self.prompt or self.content or ""

    @property
    def has_special_tokens(self) -> bool:
        """Whether the special tokens are added that the tokenizer puts around a text."""
        given = self.add_special_tokens if self.add_special is None else self.add_special
        return self.prompt is not None if given is None else given

    def check(self) -> None:
        """Raises: ErrorResponse: there are several of the fields that exclude each other, or none."""
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ErrorResponse(400, "the body must have one of prompt, content and messages", param="prompt")


class DetokenizeRequest(RequestBody):
    """The body of a request to `/v1/detokenize`: token ids."""

    tokens: Ids


class Piece(TypedDict):
    """A token: its id, and its text, or its bytes if they are not whole characters."""

    id: int
    piece: str | list[int]


class Tokenized(TypedDict):
    """Token ids of a text or a chat, their number, and the length of the model's context (null if unknown)."""

    tokens: list[int | Piece]
    count: int
    max_model_len: int | None
    token_strs: NotRequired[list[str]]


class Detokenized(TypedDict):
    """The text of token ids, twice: under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


def _parse_tokenize(body: bytes) -> TokenizeRequest | GenerationRequest:
    request = parse_request(TokenizeRequest, body)
    request.check()
    return request if request.messages is None else parse_request(ChatRequest, body).generation()


def _field_and_length(body: TokenizeRequest | GenerationRequest) -> tuple[str, int]:
    return ("prompt", len(body.text)) if isinstance(body, TokenizeRequest) else ("messages", body.prompt_length)


def _tokenized(body: TokenizeRequest | GenerationRequest, runtime: Runtime) -> Tokenized:
    tokenizer = tokenizer_of(runtime)
    if isinstance(body, GenerationRequest):
        (prompt,) = encode_prompts(body, runtime)
        return {"tokens": [*prompt], "count": len(prompt), "max_model_len": runtime.context_length}
    tokens = list(tokenized(body.text, tokenizer, add_special_tokens=body.has_special_tokens))
    result: Tokenized = {"tokens": [*tokens], "count": len(tokens), "max_model_len": runtime.context_length}
    if body.with_pieces:
        result["tokens"] = [_piece(tokenizer, token) for token in tokens]
    if body.return_token_strs:
        result["token_strs"] = [tokenizer.decode([token]) for token in tokens]
    return result


def _piece(tokenizer: Any, token: int) -> Piece:
    text: str = tokenizer.decode([token])
    bytes_ = token_bytes(tokenizer, token, text)
    return {"id": token, "piece": text if bytes_ is None or bytes_ == list(text.encode()) else bytes_}


def _detokenized(body: DetokenizeRequest, runtime: Runtime) -> Detokenized:
    # Checks only that the vocabulary has the ids: there may be more of them than the context holds.
    ids = encode_prompt(body.tokens, None, runtime.vocab_size) if body.tokens else ()
    text = tokenizer_of(runtime).decode(list(ids)) if ids else ""
    return {"prompt": text, "content": text}


OPERATIONS = (
    Operation(
        "/v1/tokenize",
        lambda context: TokenizerEndpoint(context, _parse_tokenize, _tokenized, _field_and_length),
        "tokenize",
        "The token ids of a text or a chat",
        Tokenized,
        "POST",
        TokenizeRequest,
        {"prompt": "def quicksort(items):"},
    ),
    Operation(
        "/v1/detokenize",
        lambda context: TokenizerEndpoint(
            context,
            lambda body: parse_request(DetokenizeRequest, body),
            _detokenized,
            lambda body: ("tokens", len(body.tokens)),
        ),
        "detokenize",
        "The text of token ids",
        Detokenized,
        "POST",
        DetokenizeRequest,
        {"tokens": [1, 2, 3]},
    ),
)
