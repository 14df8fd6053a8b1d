"""Answers to requests: from a body to a stream of tokens to bytes, for as long as the client is there."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import trio
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from protocol.errors import OutriderError, SettingsError
from runtime.server.answers import Writer, writer_for
from runtime.server.house import House
from runtime.server.metrics import Meters
from runtime.server.refusals import Refusal, refusal_of, short
from runtime.server.requests import AnyJson, ChatRequest, CompletionRequest, Request, SchemaJson, read
from runtime.server.timelines import Record, Timelines
from runtime.streaming import Token, TokenStream

if TYPE_CHECKING:
    from runtime.engine import Runtime
    from runtime.grammar import Grammar

T = TypeVar("T")

# Tokens that may wait for the network, beside the rounds that a stream buffers.
_BUFFERED_TOKENS = 16

# A client that watches hears at least so often what the models do, any other that its answer is still to come.
_NEWS_S = 0.25
_KEEP_ALIVE_S = 15.0

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for more
]


@attrs.frozen
class Limits:
    """What one request may take.

    Attributes:
        max_body_bytes: of a body.
        max_prompt_tokens: of a prompt; None for what the context holds.
        max_tokens: of an answer for which no number is given.
        max_tokens_limit: most that may be asked for; None for what the context holds.
        prefill_step_size: tokens of a prompt that are read in one pass: so long others wait, and a client's leaving
            goes unheeded by the models.
        body_s: seconds within which a body must have come.
        schema_s: seconds within which a JSON schema must be ready to be kept to.
        stalled_s: seconds that a client may leave what it is sent unread.
    """

    max_body_bytes: int = 2 * 2**20
    max_prompt_tokens: int | None = None
    max_tokens: int = 512
    max_tokens_limit: int | None = None
    prefill_step_size: int = 512
    body_s: float = 30.0
    schema_s: float = 10.0
    stalled_s: float = 60.0


class Aside(Protocol):
    """What does something while trio goes on with the rest."""

    async def __call__(self, do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
        """What `do` returns; see `trio.to_thread.run_sync`."""


async def in_thread(do: Callable[[], T], /, *, abandon_on_cancel: bool, limiter: trio.CapacityLimiter) -> T:
    """`trio.to_thread.run_sync`; in simulated time, which does not wait for threads, another takes its place."""
    return await trio.to_thread.run_sync(do, abandon_on_cancel=abandon_on_cancel, limiter=limiter)


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


@attrs.define
class Desk:
    """Where requests are answered; what all of them share.

    Attributes:
        runtime: whose models answer.
        model: its name.
        limits: for each request.
        house: for all of them.
        timelines: of those that are watched.
        meters: of what is done here.
        aside: tokenises and reads schemas, which may take a while.
        tokenising: one prompt at a time.
        reading_schemas: two at a time.
    """

    runtime: Runtime
    model: str
    limits: Limits
    house: House
    timelines: Timelines
    meters: Meters
    aside: Aside
    tokenising: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(1))
    reading_schemas: trio.CapacityLimiter = attrs.field(factory=lambda: trio.CapacityLimiter(2))


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

    def __init__(self, desk: Desk, kind: type[CompletionRequest] | type[ChatRequest]) -> None:
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
            body = await _body(scope, receive, desk.limits)
            request = read(self._kind, body)
            _check_model(request, desk.model)
            with desk.house.room():
                await _while_there(receive, send, desk.limits.stalled_s, partial(self._answer, request, attempt))
        except Refusal as refusal:
            attempt.status = refusal.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            attempt.failure, attempt.status = error, 500  # and the application says so
            raise
        finally:
            desk.meters.count(attempt.stream, attempt.failure, attempt.status)

    async def _answer(self, request: Request, attempt: _Attempt, send: Send) -> None:
        """Answer a request to a client that is there.

        Raises: Refusal: it is not answered; nothing was sent.
        """
        desk = self._desk
        try:
            prompt, settings = await self._prepared(request)
            stream = desk.runtime.stream(prompt, **settings)
        except OutriderError as error:
            raise refusal_of(error, request.prompt_field) from error
        attempt.stream = stream
        async with stream:
            writer = writer_for(
                request,
                desk.model,
                _tokenizer(desk.runtime),
                **_thinking(request, stream),
            )
            record = desk.timelines.watch(writer.id, stream.session, stream.began) if request.speculation else None
            if request.stream:
                attempt.failure = await _stream(request, stream, writer, record, send)
                return
            attempt.failure = await _whole(stream, writer, send)
            if attempt.failure is not None:
                raise refusal_of(attempt.failure) from attempt.failure

    async def _prepared(self, request: Request) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The prompt and the settings of a request.

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
            settings["logits_processors"] = [await self._grammar(schema)]
        # Abandoned where the client leaves: no model is involved, and the result is of use to nobody.
        prompt = await desk.aside(
            partial(_encoded, request, desk.runtime), abandon_on_cancel=True, limiter=desk.tokenising
        )
        most = desk.limits.max_prompt_tokens
        if most is not None and len(prompt) > most:
            raise Refusal(
                400,
                f"the prompt has {len(prompt)} tokens, and this server takes {most}; shorten it",
                param=request.prompt_field,
                code="context_length_exceeded",
            )
        return prompt, settings

    async def _grammar(self, schema: dict[str, Any] | bool) -> Grammar:
        """The logits processor that a JSON schema stands for.

        Raises: Refusal: it cannot be kept to, or takes too long to get ready.
        """
        desk, has_begun = self._desk, False
        from runtime.grammar import Grammar

        def make() -> Grammar:
            nonlocal has_begun
            has_begun = True
            return Grammar.from_json_schema(schema, desk.runtime.tokenizer)

        seconds = desk.limits.schema_s
        # There are small schemas that take minutes. They are abandoned, and keep busy what only other schemas need.
        with trio.move_on_after(seconds):
            try:
                return await desk.aside(make, abandon_on_cancel=True, limiter=desk.reading_schemas)
            except SettingsError as error:
                raise Refusal(400, str(error), param="response_format") from error
        if has_begun:
            raise Refusal(
                400,
                f"the JSON schema was not ready to be kept to within {seconds:g} s; simplify it",
                param="response_format",
            )
        raise Refusal(
            429,
            "schemas of other requests are being read; try again in a while",
            type="rate_limit_error",
            code="schemas_waiting",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


# --- from a request to the runtime ----------------------------------------------------------------


def _check_model(request: Request, name: str) -> None:
    if request.model is not None and request.model != name:
        raise Refusal(
            404, f"there is no model {short(request.model)} here; it is {name!r}", param="model", code="model_not_found"
        )


def _most_tokens(request: Request, limits: Limits) -> int:
    wanted, most = request.most_tokens, limits.max_tokens_limit
    if wanted is None:
        return limits.max_tokens if most is None else min(limits.max_tokens, most)
    if most is not None and wanted > most:
        raise Refusal(400, f"max_tokens must be at most {most} here, got {wanted}", param="max_tokens")
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
    if not isinstance(request, ChatRequest):
        return {}
    return {"tags": stream.answer.tags, "is_thinking": stream.answer.is_thinking}


# --- from the runtime to the client ---------------------------------------------------------------


async def _whole(stream: TokenStream, writer: Writer, send: Send) -> OutriderError | None:
    """Send the answer as one body.

    Returns: what the generation failed with, if it did; then nothing was sent.
    """
    try:
        tokens = [token async for token in stream]
    except OutriderError as error:
        return error
    response = JSONResponse(writer.whole(tokens, stream.statistics()))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return None


async def _stream(
    request: Request, stream: TokenStream, writer: Writer, record: Record | None, send: Send
) -> OutriderError | None:
    """Send the answer as it comes, by server-sent events.

    Returns: what the generation failed with, if it did; the client was told.
    """

    async def write(text: str, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    put, take = trio.open_memory_channel[Token](_BUFFERED_TOKENS)
    failures: list[OutriderError] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read, stream, put, failures)
        # At once, so that a client knows its answer's id, and that it is worked on.
        await write(_event(_with_news(writer.chunk([]), [], stream, record)))
        while (tokens := await _batch(take, _KEEP_ALIVE_S if record is None else _NEWS_S)) is not None:
            if not tokens and record is None:
                await write(": keep-alive\n\n")
                continue
            await write(_event(_with_news(writer.chunk(tokens), tokens, stream, record)))
    if failures:
        await write(_event(refusal_of(failures[0]).body()), is_last=True)
        return failures[0]
    usage = _event(writer.last_chunk(stream.statistics())) if request.usage else ""
    await write(usage + "data: [DONE]\n\n", is_last=True)
    return None


async def _read(stream: TokenStream, put: trio.MemorySendChannel[Token], failures: list[OutriderError]) -> None:
    """Hand a stream's tokens over; if it fails, note with what."""
    with put:
        try:
            async for token in stream:
                await put.send(token)
        except OutriderError as error:
            failures.append(error)


async def _batch(take: trio.MemoryReceiveChannel[Token], timeout_s: float) -> list[Token] | None:
    """The tokens that are there, at least one, unless none comes for so long; None at the end."""
    try:
        with trio.move_on_after(timeout_s):
            # Which the channel may be waited for again after: a stream could not.
            tokens = [await take.receive()]
            while take.statistics().current_buffer_used:
                tokens.append(take.receive_nowait())
            return tokens
    except trio.EndOfChannel:
        return None
    return []


def _with_news(
    chunk: dict[str, Any], tokens: Iterable[Token], stream: TokenStream, record: Record | None
) -> dict[str, Any]:
    """A chunk, and for a client that watches, what has happened."""
    if record is None:
        return chunk
    statistics = stream.statistics()
    so_far = {
        name: getattr(statistics, name)
        for name in (
            "prompt_tokens",
            "generated_tokens",
            "proposed",
            "accepted",
            "acceptance_rate",
            "generation_tps",
            "time_to_first_token",
            "elapsed",
        )
    }
    drafted = [
        {"id": token.id, "text": token.text, "from_draft": token.from_draft, "is_thinking": token.is_thinking}
        for token in tokens
    ]
    return {**chunk, "speculation": {"tokens": drafted, "statistics": so_far, "spans": record.news()}}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"


# --- as long as the client is there ---------------------------------------------------------------


async def _body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
        Refusal: it is too long, takes too long, or is not said to be JSON.
        ClientGone: the client has left.
    """
    headers = dict(scope["headers"])
    # A page of another host can make a browser send anything but this without asking.
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
        raise Refusal(415, "the body must be JSON, and be said to be: send Content-Type: application/json")
    too_long = Refusal(413, f"the body is longer than {limits.max_body_bytes} bytes; shorten it")
    # Not read to its end: whoever sends too much is not waited for. Of too many digits Python makes no number.
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > limits.max_body_bytes):
        raise too_long
    body = bytearray()
    with trio.move_on_after(limits.body_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > limits.max_body_bytes:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)
    raise Refusal(408, f"the body did not come within {limits.body_s:g} s")


async def _while_there(receive: Receive, send: Send, stalled_s: float, work: Callable[[Send], Awaitable[None]]) -> None:
    """Do some work for a client as long as it is there, and takes what it is sent.

    Args:
        receive, send: ASGI's.
        stalled_s: seconds that it may leave something unread.
        work: is given a `send` that sees to that.

    Raises:
        ClientGone: it has left, and the work was cancelled.
        Refusal: the work raised it.
    """
    is_gone = False
    refused: Refusal | None = None

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        nursery.cancel_scope.cancel()

    async def hear() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    async def send_patiently(message: Message) -> None:
        with trio.move_on_after(stalled_s) as patience:
            await send(message)
        if patience.cancelled_caught:
            leave()
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear)
        # Kept, not let through: the nursery would wrap it in a group.
        try:
            await work(send_patiently)
        except Refusal as refusal:
            refused = refusal
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused
    if is_gone:
        raise ClientGone
