"""Endpoints that use a target's tokenizer, and not the model: `/v1/tokenize` and `/v1/detokenize`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from protocol.errors import OutriderError
from runtime.generation.text import encode_prompt, tokenized
from runtime.server.connections.client import ClientGone, client_address, while_there
from runtime.server.errors import error_response_of
from runtime.server.generation_endpoints import ServerContext, check_ignored, read_request, requested_model
from runtime.server.openai.prompts import encode_request, tokenizer_of
from runtime.server.openai.requests import ChatRequest
from runtime.server.openai.requests.parsing import parse_request
from runtime.server.openai.requests.tokens import DetokenizeRequest, TokenizeRequest, parse_tokenize
from runtime.server.openai.responses import Detokenized, Piece, Tokenized
from runtime.server.openai.token_logprobs import token_bytes

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

B = TypeVar("B", TokenizeRequest | ChatRequest, ChatRequest, DetokenizeRequest)


class TokenizerEndpoint(ABC, Generic[B]):
    """An ASGI application that answers one type of request with the tokenizer; `B` is the type of its parsed body."""

    def __init__(self, context: ServerContext) -> None:
        """Of a server."""
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.

        Raises: ErrorResponse: the request is rejected; nothing was sent.

        Cancellation: as of `FairThreads.run`.
        """
        context = self._context
        context.admission.check()
        client = client_address(scope)

        try:
            body = await read_request(context, self.parse, scope, receive, client)
            check_ignored(context, body.ignored)
            respond = partial(self._respond, body, requested_model(context, body.model), client)
            await while_there(receive, body.ignored.named_by(send), context.limits.stalled_s, respond)
        except ClientGone:
            pass

    async def _respond(self, body: B, model_name: str, client: str, send: Send) -> None:
        context = self._context
        try:
            async with context.models.use(model_name) as model:
                runtime = model.runtime
                # The JSON of a long result takes a while, too.
                response = await context.preparation.run(
                    lambda: JSONResponse(self.result(body, runtime)), self.length(body), client
                )
        except OutriderError as error:
            raise error_response_of(error, self.field(body)) from error
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    @abstractmethod
    def parse(self, body: bytes) -> B:
        """Parse and validate the body of a request.

        Raises: ErrorResponse: the body is invalid.
        """

    @abstractmethod
    def field(self, body: B) -> str:
        """The name of the field that the tokenizer works on."""

    @abstractmethod
    def length(self, body: B) -> int:
        """Characters or tokens that the tokenizer works on."""

    @abstractmethod
    def result(self, body: B, runtime: Runtime) -> Mapping[str, Any]:
        """The response; runs in another thread.

        Raises:
            OutriderError: the tokenizer does not take the text, or the vocabulary does not have the ids.
            ErrorResponse: a tool of a chat is invalid.
        """


class TokenizeEndpoint(TokenizerEndpoint[TokenizeRequest | ChatRequest]):
    """`/v1/tokenize`: a text or a chat, as token ids."""

    def parse(self, body: bytes) -> TokenizeRequest | ChatRequest:
        return parse_tokenize(body)

    def field(self, body: TokenizeRequest | ChatRequest) -> str:
        return "messages" if isinstance(body, ChatRequest) else "prompt"

    def length(self, body: TokenizeRequest | ChatRequest) -> int:
        return body.prompt_length if isinstance(body, ChatRequest) else len(body.text)

    def result(self, body: TokenizeRequest | ChatRequest, runtime: Runtime) -> Tokenized:
        tokenizer = tokenizer_of(runtime)
        if isinstance(body, ChatRequest):
            tokens = list(encode_request(body, runtime))
        else:
            tokens = list(tokenized(body.text, tokenizer, add_special_tokens=body.has_special_tokens))
        result: Tokenized = {"tokens": [*tokens], "count": len(tokens), "max_model_len": runtime.context_length}
        if isinstance(body, TokenizeRequest) and body.with_pieces:
            result["tokens"] = [_piece(tokenizer, token) for token in tokens]
        if isinstance(body, TokenizeRequest) and body.return_token_strs:
            result["token_strs"] = [tokenizer.decode([token]) for token in tokens]
        return result


class DetokenizeEndpoint(TokenizerEndpoint[DetokenizeRequest]):
    """`/v1/detokenize`: token ids, as text."""

    def parse(self, body: bytes) -> DetokenizeRequest:
        return parse_request(DetokenizeRequest, body)

    def field(self, body: DetokenizeRequest) -> str:
        return "tokens"

    def length(self, body: DetokenizeRequest) -> int:
        return len(body.tokens)

    def result(self, body: DetokenizeRequest, runtime: Runtime) -> Detokenized:
        # Checks that the vocabulary has them. There may be more of them than the context holds.
        ids = encode_prompt(body.tokens, None, runtime.vocab_size) if body.tokens else ()
        text = tokenizer_of(runtime).decode(list(ids)) if ids else ""
        return {"prompt": text, "content": text}


def _piece(tokenizer: Any, token: int) -> Piece:
    text: str = tokenizer.decode([token])
    bytes_ = token_bytes(tokenizer, token, text)
    return {"id": token, "piece": text if bytes_ is None or bytes_ == list(text.encode()) else bytes_}
