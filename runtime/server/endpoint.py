"""Answers to requests: from a body to a stream of tokens, which `runtime.server.openai.event_stream` makes bytes of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs
import trio
from starlette.types import Receive, Scope, Send

from protocol.errors import OutriderError
from runtime.generation.text import apply_chat_template
from runtime.server.access_log import TOKENS
from runtime.server.admission import RequestAdmission
from runtime.server.background import Background
from runtime.server.connections.client import ClientGone, client_address, read_body, while_there
from runtime.server.errors import ErrorResponse, error_response_of, short
from runtime.server.grammars.schemas import Schemas
from runtime.server.metrics import Metrics
from runtime.server.openai.event_stream import send_as_it_comes, send_whole
from runtime.server.openai.requests import AnyJson, ChatRequest, CompletionRequest, Request, SchemaJson, read
from runtime.server.openai.serializers import serializer_for
from runtime.server.timelines import Timelines

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime
    from runtime.generation.token_stream import TokenStream


@attrs.frozen
class Limits:
    """What one request may take.

    Attributes:
        max_body_bytes: of a body.
        max_prompt_tokens: of a prompt; None for what the context holds.
        max_tokens: of an answer for which no number is given.
        max_tokens_limit: most that may be asked for; None for what the context holds.
        prefill_step_size: see `Settings`; for so long others wait, and a client's leaving goes unheeded by the models.
        body_s: seconds within which a body must have come.
        schema_s: seconds that a JSON schema may wait to be compiled, and as many that it may then take.
        stalled_s: seconds that a client may leave what it is sent unread.
    """

    max_body_bytes: int = 2 * 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int = 512
    max_tokens_limit: int | None = None
    prefill_step_size: int | Literal["auto"] = "auto"
    body_s: float = 30.0
    schema_s: float = 10.0
    stalled_s: float = 60.0


@attrs.define
class ServerContext:
    """Where requests are answered; what all of them share.

    Attributes:
        runtime: whose models answer.
        model: its name.
        limits: for each request.
        house: for all of them.
        timelines: of those that are watched.
        meters: of what is done here.
        aside: tokenises, which may take a while.
        schemas: makes grammars of JSON schemas.
        tokenising: one prompt at a time.
    """

    runtime: Runtime
    model: str
    limits: Limits
    house: RequestAdmission
    timelines: Timelines
    meters: Metrics
    aside: Background
    schemas: Schemas
    tokenising: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))


@attrs.define
class _Attempt:
    """What has become of a request by now.

    Attributes:
        stream: its answer, once that has begun.
        failure: what the answer failed with.
        status: with which the request was refused.
    """

    stream: TokenStream | None = None
    failure: Exception | None = None
    status: int | None = None


class Endpoint:
    """Answers one kind of request; an ASGI application."""

    def __init__(self, desk: ServerContext, kind: type[CompletionRequest] | type[ChatRequest]) -> None:
        """For `/v1/completions`, or for `/v1/chat/completions`."""
        self._desk = desk
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises: Refusal: it is not answered; nothing was sent.

        Cancellation: ends the generation.
        """
        desk, attempt = self._desk, _Attempt()
        try:
            desk.house.check_room()
            body = await read_body(scope, receive, desk.limits.max_body_bytes, desk.limits.body_s)
            request = read(self._kind, body)
            _check_model(request, desk.model)
            with desk.house.room():
                await while_there(
                    receive, send, desk.limits.stalled_s, partial(self._answer, request, client_address(scope), attempt)
                )
        except ErrorResponse as refusal:
            attempt.status = refusal.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            attempt.failure, attempt.status = error, 500  # and the application says so
            raise
        finally:
            desk.meters.count(attempt.stream, attempt.failure, attempt.status)
            if attempt.stream is not None:
                statistics = attempt.stream.statistics()
                scope[TOKENS] = statistics.prompt_tokens, statistics.generated_tokens

    async def _answer(self, request: Request, client: str, attempt: _Attempt, send: Send) -> None:
        """Answer a request to a client that is there.

        Raises: Refusal: it is not answered; nothing was sent.
        """
        desk = self._desk
        try:
            prompt, settings = await self._prepared(request, client)
            stream = desk.runtime.stream(prompt, **settings)
        except OutriderError as error:
            raise error_response_of(error, request.prompt_field) from error
        attempt.stream = stream
        async with stream:
            writer = serializer_for(
                request,
                desk.model,
                _tokenizer(desk.runtime),
                **_thinking(request, stream),
            )
            record = desk.timelines.watch(writer.id, stream.session, stream.began) if request.speculation else None
            if request.stream:
                attempt.failure = await send_as_it_comes(request, stream, writer, record, send)
                return
            attempt.failure = await send_whole(stream, writer, send)
            if attempt.failure is not None:
                raise error_response_of(attempt.failure) from attempt.failure

    async def _prepared(self, request: Request, client: str) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The prompt and the settings of a request, which is from this client.

        Raises:
            OutriderError: a setting or the prompt is wrong.
            Refusal: likewise.
        """
        desk = self._desk
        settings = {
            "max_tokens": _most_tokens(request, desk.limits),
            "reuse_prefix": True,
            "prefill_step_size": desk.limits.prefill_step_size,
            **request.settings(),
        }

        if (schema := _schema(request)) is not None:
            settings["logits_processors"] = [await desk.schemas.grammar(schema, client)]
        # Abandoned where the client leaves: no model is involved, and the result is of use to nobody.
        prompt = await desk.aside(
            partial(_encoded, request, desk.runtime), abandon_on_cancel=True, limiter=desk.tokenising
        )
        most = desk.limits.max_prompt_tokens
        if most is not None and len(prompt) > most:
            raise ErrorResponse(
                400,
                f"the prompt has {len(prompt)} tokens, and this server takes {most}; shorten it",
                param=request.prompt_field,
                code="context_length_exceeded",
            )
        return prompt, settings


# --- from a request to the runtime ----------------------------------------------------------------


def _check_model(request: Request, name: str) -> None:
    if request.model is not None and request.model != name:
        raise ErrorResponse(
            404, f"there is no model {short(request.model)} here; it is {name!r}", param="model", code="model_not_found"
        )


def _most_tokens(request: Request, limits: Limits) -> int:
    wanted, most = request.most_tokens, limits.max_tokens_limit
    if wanted is None:
        return limits.max_tokens if most is None else min(limits.max_tokens, most)
    if most is not None and wanted > most:
        field = request.most_tokens_field
        raise ErrorResponse(400, f"{field} must be at most {most} here, got {wanted}", param=field)
    return wanted


def _tokenizer(runtime: Runtime) -> Any:
    assert runtime.tokenizer is not None, "a server's target has a tokenizer"
    return runtime.tokenizer


def _encoded(request: Request, runtime: Runtime) -> tuple[int, ...]:
    if isinstance(request, CompletionRequest):
        return runtime.encode(request.text)
    assert isinstance(request, ChatRequest)
    messages = [message.plain() for message in request.messages]
    if _tokenizer(runtime).has_chat_template:
        if _schema(request) is not None:
            # JSON from the first token on leaves no room for thoughts; a template that has no such switch ignores it.
            return runtime.encode(apply_chat_template(messages, _tokenizer(runtime), enable_thinking=False))
        return runtime.encode(messages)
    # As in a conversation with a base model: a running text.
    return runtime.encode("".join(message["content"] for message in messages))


def _schema(request: Request) -> dict[str, Any] | bool | None:
    """What a response format has an answer keep to; None for nothing."""
    wanted = request.response_format
    if isinstance(wanted, SchemaJson):
        return wanted.json_schema.schema_
    return {"type": "object"} if isinstance(wanted, AnyJson) else None


def _thinking(request: Request, stream: TokenStream) -> dict[str, Any]:
    # What keeps to a schema is the answer, also where the template has opened a thought and cannot be told not to.
    if not isinstance(request, ChatRequest) or _schema(request) is not None:
        return {}
    return {"tags": stream.answer.tags, "is_thinking": stream.answer.is_thinking}
