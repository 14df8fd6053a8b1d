"""Bodies of requests to `/v1/tokenize` and `/v1/detokenize`, in the forms of vLLM and of llama.cpp."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from runtime.server.answers.body import NoEffect
from runtime.server.answers.ignored_fields import RequestBody
from runtime.server.errors import ErrorResponse
from runtime.server.openai.requests.chat import ChatRequest
from runtime.server.openai.requests.field_types import Ids
from runtime.server.openai.requests.parsing import parse_request


class TokenizeRequest(RequestBody):
    """The body of a request to `/v1/tokenize`: a text. A body with `messages` is that of a chat."""

    model: str | None = Field(None, description="the name in `/v1/models`; any name, where there is one model")
    prompt: str | None = Field(None, description="a text, with the special tokens that the tokenizer adds")
    content: str | None = Field(None, description="a text, without special tokens")
    add_special_tokens: bool | None = Field(None, description="whether special tokens are added; also `add_special`")
    add_special: bool | None = None
    parse_special: NoEffect = None
    return_token_strs: bool | None = Field(None, description="give the text of each token as `token_strs`")
    with_pieces: bool | None = Field(
        None, description="give each token as an object with its text; or with its bytes, if it is no whole text"
    )
    messages: Any = Field(None, description="a chat, with the other fields of a request to `/v1/chat/completions`")

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
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ErrorResponse(400, "the body must have one of prompt, content and messages", param="prompt")


class DetokenizeRequest(RequestBody):
    """The body of a request to `/v1/detokenize`: token ids."""

    model: str | None = Field(None, description="the name in `/v1/models`; any name, where there is one model")
    tokens: Ids


def parse_tokenize(body: bytes) -> TokenizeRequest | ChatRequest:
    """Parse and validate the body of a request to `/v1/tokenize`.

    Raises: ErrorResponse: the body is invalid.
    """
    request = parse_request(TokenizeRequest, body)
    return request if request.messages is None else parse_request(ChatRequest, body)
