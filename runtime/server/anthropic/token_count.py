"""The endpoint `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.server.anthropic.requests import TokenCountRequest, parse_chat
from runtime.server.anthropic.responses import TokenCount
from runtime.server.openai.prompts import encode_request
from runtime.server.openai.requests import ChatRequest
from runtime.server.tokenizer_endpoints import TokenizerEndpoint

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime


class TokenCountEndpoint(TokenizerEndpoint[ChatRequest]):
    """Counts the tokens of a conversation, as `/v1/messages` would read it."""

    def parse(self, body: bytes) -> ChatRequest:
        return parse_chat(TokenCountRequest, body)

    def field(self, body: ChatRequest) -> str:
        return body.prompt_field

    def length(self, body: ChatRequest) -> int:
        return body.prompt_length

    def result(self, body: ChatRequest, runtime: Runtime) -> TokenCount:
        return {"input_tokens": len(encode_request(body, runtime))}
