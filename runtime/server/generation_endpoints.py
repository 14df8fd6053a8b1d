"""Endpoints that generate: from a request's body to a stream of tokens, and the response to it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs
from starlette.types import Receive, Scope, Send

from protocol.errors import OutriderError
from runtime.server.access_log import TOKENS
from runtime.server.admission import RequestAdmission
from runtime.server.connections.body_memory import BodyMemory
from runtime.server.connections.client import ClientGone, client_address, read_body, while_there
from runtime.server.errors import ErrorResponse, error_response_of, short_json
from runtime.server.grammars.schemas import ANY_OBJECT, Schemas
from runtime.server.metrics import Metrics
from runtime.server.openai.event_stream import send_events, send_whole
from runtime.server.openai.reasoning import ReasoningSplitter
from runtime.server.openai.requests import AnyJson, ChatRequest, CompletionRequest, Request, SchemaJson, parse_request
from runtime.server.openai.serializers import serializer_for
from runtime.server.preparation import SHORT, Preparation
from runtime.server.timelines import Timelines

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.token_stream import TokenStream


@attrs.frozen
class Limits:
    """Limits of one request.

    Attributes:
        max_body_bytes: of the body.
        max_bodies_bytes: of the bodies of all requests that are being read, beyond the first 16 KiB of each; at least
            `max_body_bytes`.
        max_prompt_tokens: of the prompt; None for the context's length.
        max_tokens: default of the request's field `max_tokens`.
        max_tokens_limit: maximum of that field; None for the context's length.
        prefill_step_size: see `Settings`. During one prefill pass, other requests wait and a cancellation has no effect
            on the models.
        body_s: seconds within which the whole body must arrive.
        schema_s: seconds that a JSON schema may wait to be compiled, and then again seconds that it may take.
        stalled_s: seconds that the client may leave 64 KiB of the response unread.
    """

    max_body_bytes: int = 2 * 2**20
    max_bodies_bytes: int = 64 * 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int = 512
    max_tokens_limit: int | None = None
    prefill_step_size: int | Literal["auto"] = "auto"
    body_s: float = 30.0
    schema_s: float = 10.0
    stalled_s: float = 60.0


@attrs.define
class ServerContext:
    """What all requests of a server share.

    Attributes:
        runtime: generates.
        model: the target's name.
        limits: of each request.
        admission: of all requests.
        timelines: of the streams that are watched.
        metrics: of all requests.
        preparation: parses bodies and tokenises prompts, which may take long.
        schemas: compiles JSON schemas to grammars.
        body_memory: of the bodies that are being read.
    """

    runtime: Runtime
    model: str
    limits: Limits
    admission: RequestAdmission
    timelines: Timelines
    metrics: Metrics
    preparation: Preparation
    schemas: Schemas
    body_memory: BodyMemory


@attrs.define
class _Outcome:
    """What became of a request, for metrics and access log.

    Attributes:
        stream: its generation, once it has begun.
        failure: the error of the generation or of the server.
        status: the HTTP status of an error response.
    """

    stream: TokenStream | None = None
    failure: Exception | None = None
    status: int | None = None


class Endpoint:
    """An ASGI application that generates for one type of request."""

    def __init__(self, context: ServerContext, request_type: type[CompletionRequest] | type[ChatRequest]) -> None:
        """For `/v1/completions` or `/v1/chat/completions`, by the type of request."""
        self._context = context
        self._request_type = request_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.

        Raises: ErrorResponse: the request is rejected or has failed; nothing was sent.

        Cancellation: ends the generation.
        """
        context, outcome = self._context, _Outcome()
        try:
            # Before the body is read, so that a client need not send one that cannot be admitted.
            context.admission.check()
            client = client_address(scope)
            request = await self._read_request(scope, receive, client)
            _check_model(request, context.model)
            with context.admission.admit():
                respond = partial(self._respond, request, client, outcome)
                await while_there(receive, send, context.limits.stalled_s, respond)
        except ErrorResponse as error:
            outcome.status = error.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            outcome.failure, outcome.status = error, 500  # the status that the application responds with
            raise
        finally:
            context.metrics.count(outcome.stream, outcome.failure, outcome.status)
            if outcome.stream is not None:
                statistics = outcome.stream.statistics()
                scope[TOKENS] = statistics.prompt_tokens, statistics.generated_tokens

    async def _read_request(self, scope: Scope, receive: Receive, client: str) -> Request:
        """The request, from its body.

        Raises:
            ErrorResponse: the request is rejected.
            ClientGone: the client has left.
        """
        context, limits = self._context, self._context.limits
        with context.body_memory.claim() as claim:
            body = await read_body(scope, receive, limits.max_body_bytes, limits.body_s, claim)
            parse = partial(parse_request, self._request_type, body)
            # A long one is not read on trio's thread, which serves everybody.
            return parse() if len(body) <= SHORT else await context.preparation.run(parse, len(body), client)

    async def _respond(self, request: Request, client: str, outcome: _Outcome, send: Send) -> None:
        """Generate, and send the response; `outcome` gets the stream and its failure.

        Raises: ErrorResponse: the request is rejected or has failed; nothing was sent.
        """
        context = self._context
        try:
            prompt, settings = await self._prepare(request, client)
            stream = context.runtime.stream(prompt, **settings)
        except OutriderError as error:
            raise error_response_of(error, request.prompt_field) from error
        outcome.stream = stream
        async with stream:
            serializer = serializer_for(
                request, context.model, _tokenizer(context.runtime), _reasoning_splitter(request, stream)
            )
            if request.stream:
                timeline = None
                if request.speculation:
                    timeline = context.timelines.watch(serializer.id, stream.session, stream.began)
                outcome.failure = await send_events(request, stream, serializer, timeline, send)
                return
            outcome.failure = await send_whole(stream, serializer, send)
            if outcome.failure is not None:
                raise error_response_of(outcome.failure) from outcome.failure

    async def _prepare(self, request: Request, client: str) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The prompt as token ids, and the settings of its generation.

        Args:
            request: the request.
            client: the client's address; clients take turns at long prompts and at schemas.

        Raises:
            OutriderError: a setting or the prompt is invalid.
            ErrorResponse: the prompt is too long, or its JSON schema cannot be compiled.
        """
        context = self._context
        settings = {
            "max_tokens": _max_tokens(request, context.limits),
            "reuse_prefix": True,
            "prefill_step_size": context.limits.prefill_step_size,
            **request.settings(),
        }
        if (schema := _schema(request)) is not None:
            settings["logits_processors"] = [await context.schemas.grammar(schema, client)]
        encode = partial(_encode, request, context.runtime)
        prompt = await context.preparation.run(encode, request.prompt_length, client)
        limit = context.limits.max_prompt_tokens
        if limit is not None and len(prompt) > limit:
            raise ErrorResponse(
                400,
                f"the prompt must have at most {limit} tokens, got {len(prompt)}; shorten it",
                param=request.prompt_field,
                code="context_length_exceeded",
            )
        return prompt, settings


# --- from a request to the runtime ----------------------------------------------------------------


def _check_model(request: Request, name: str) -> None:
    if request.model is not None and request.model != name:
        raise ErrorResponse(
            404,
            f"there is no model {short_json(request.model)} here; use {name!r} or leave it out",
            param="model",
            code="model_not_found",
        )


def _max_tokens(request: Request, limits: Limits) -> int:
    requested, limit = request.max_answer_tokens, limits.max_tokens_limit
    if requested is None:
        return limits.max_tokens if limit is None else min(limits.max_tokens, limit)
    if limit is not None and requested > limit:
        field = request.max_answer_tokens_field
        raise ErrorResponse(400, f"{field} must be at most {limit} here, got {requested}", param=field)
    return requested


def _tokenizer(runtime: Runtime) -> Any:
    assert runtime.tokenizer is not None, "a server's target has a tokenizer"
    return runtime.tokenizer


def _encode(request: Request, runtime: Runtime) -> tuple[int, ...]:
    """The prompt of a request as token ids."""
    if isinstance(request, CompletionRequest):
        return runtime.encode(request.text_or_ids)
    assert isinstance(request, ChatRequest)
    messages = [message.plain() for message in request.messages]
    if _tokenizer(runtime).has_chat_template:
        if _schema(request) is not None:
            # An answer that is JSON from its first token has no reasoning. Templates without this switch ignore it.
            return runtime.encode(messages, enable_thinking=False)
        return runtime.encode(messages)
    # Without a template, the messages are one running text, as in a conversation with a base model.
    return runtime.encode("".join(message["content"] for message in messages))


def _schema(request: Request) -> dict[str, Any] | bool | None:
    """The JSON schema of a request's response format; None if it has none."""
    response_format = request.response_format
    if isinstance(response_format, SchemaJson):
        return response_format.json_schema.schema_
    return ANY_OBJECT if isinstance(response_format, AnyJson) else None


def _reasoning_splitter(request: Request, stream: TokenStream) -> ReasoningSplitter | None:
    """The splitter of a chat's text; None where all of the text is the answer."""
    # With a schema, the whole text is the answer, even if the template has opened the reasoning.
    if not isinstance(request, ChatRequest) or _schema(request) is not None or not all(stream.answer.tags):
        return None
    return ReasoningSplitter(stream.answer.tags, is_thinking=stream.answer.is_thinking)
