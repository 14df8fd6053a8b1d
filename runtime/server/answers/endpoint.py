"""The way of a request: from its body to a stream of tokens, and from there to the response."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

import attrs
import trio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from protocol.errors import OutriderError, RuntimeClosedError
from protocol.randomness import seed_of_text
from protocol.statistics import Statistics
from runtime.engine.nursery import BackgroundNursery
from runtime.engine.runtime import Runtime
from runtime.engine.sessions import NEW_READER
from runtime.generation.tokens import Token
from runtime.server.answers.api import BegunAnswer, Choice, Choices, Serializer, ServerSentEvent, end_without_token
from runtime.server.answers.body import ClientGone, RequestBody, read_body
from runtime.server.answers.preparation import Preparation, PreparedPrompt
from runtime.server.answers.request import GenerationRequest
from runtime.server.context import SHORT, ServerContext
from runtime.server.errors import ErrorResponse, error_response_of
from runtime.server.middleware import TOKENS
from runtime.server.operations import COMMON_ERRORS, ErrorForm, Operation
from runtime.server.reports import RequestOutcome

Parsed = tuple[GenerationRequest, Callable[[BegunAnswer], Serializer]]
"""A request, and what makes the serializer of its response, or of one of its choices."""


B = TypeVar("B")


class TextBody(RequestBody):
    """The body of a request about a text: its field that has the text, and the characters or tokens in it."""

    prompt_field: ClassVar[str]

    @property
    def prompt_length(self) -> int:
        """Number of characters or tokens."""
        return len(getattr(self, self.prompt_field) or "")


R = TypeVar("R", bound=TextBody | GenerationRequest)


async def read_request(context: ServerContext, parse: Callable[[bytes], B], scope: Scope, receive: Receive) -> B:
    """The body of a request, parsed; in another thread if it is long. Raises: ErrorResponse or ClientGone."""
    # Before the body is read, so that a client need not send one that cannot be admitted.
    context.admission.check()
    limits = context.limits
    with context.body_memory.claim() as claim:
        body = await read_body(scope, receive, limits.max_body_bytes, limits.body_s, claim)
        # A long one is not parsed on trio's thread, which serves everybody.
        if len(body) <= SHORT:
            return parse(body)
        return await context.in_thread(partial(parse, body), len(body))


def model_of(context: ServerContext, request: RequestBody | GenerationRequest) -> str:
    """The name of a request's model. Raises: ErrorResponse: there is none, or a strict server refuses the request."""
    if context.is_strict:
        request.ignored.refuse()
    # A server of one model takes any name, as clients have their own, unless it is strict.
    is_any = len(context.models.specs) == 1 and not context.is_strict
    return context.find_model(None if is_any else request.model, param="model")


async def while_there(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work for a client; cancel it when the client leaves, or has not read for long."""

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        there.cancel()

    with trio.CancelScope() as there:
        async with BackgroundNursery() as nursery:
            nursery.start_soon(listen)
            await work()


@attrs.frozen
class TokenizerEndpoint(Generic[R]):
    """An ASGI application that answers one type of request with the tokenizer; `R` is the type of its body."""

    _parse: Callable[[bytes], R]  # may raise ErrorResponse
    _result: Callable[[R, Runtime], Mapping[str, Any]]  # called in another thread; may raise it, or OutriderError
    _context: ServerContext

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            body = await read_request(self._context, self._parse, scope, receive)
            model_name = model_of(self._context, body)
            await while_there(receive, partial(self._respond, body, model_name, send))

    async def _respond(self, body: R, model_name: str, send: Send) -> None:
        try:
            async with self._context.models.use(model_name) as model:
                # The JSON of a long result takes a while, too.
                make = lambda: JSONResponse(self._result(body, model.runtime))  # noqa: E731
                response = await self._context.in_thread(make, body.prompt_length)
        except OutriderError as error:
            raise error_response_of(error, body.prompt_field) from error
        await _send_response(response, body, send)


@attrs.frozen
class Endpoint:
    """An ASGI application that generates for one type of request. A cancellation ends the generation."""

    _context: ServerContext
    _parse: Callable[[bytes], Parsed]  # called in another thread if the body is long; may raise ErrorResponse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, outcome = self._context, RequestOutcome()
        client, _ = scope["client"]  # behind a proxy that is not trusted, the proxy's address
        try:
            request, make_serializer = await read_request(context, self._parse, scope, receive)
            outcome.model = model_of(context, request)
            with context.admission.admit():
                await while_there(receive, partial(self._respond, request, make_serializer, client, outcome, send))
        except ErrorResponse as error:
            outcome.status = error.status
            raise
        except ClientGone:
            pass
        except Exception as error:
            outcome.failure, outcome.status = error, 500  # the status that the application responds with
            raise
        finally:
            context.metrics.count(outcome)
            if outcome.streams:
                num_generated = sum(stream.statistics().generated_tokens for stream in outcome.streams)
                scope[TOKENS] = outcome.num_prompt_tokens, num_generated

    async def _respond(
        self,
        request: GenerationRequest,
        make_serializer: Callable[[BegunAnswer], Serializer],
        client: str,
        outcome: RequestOutcome,
        send: Send,
    ) -> None:
        assert outcome.model is not None
        send_answer = send_events if request.stream else send_whole
        try:
            async with self._context.models.use(outcome.model) as model:
                preparation = Preparation(self._context, model, request, client)
                prompts = await preparation.prompts()
                outcome.num_prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
                outcome.num_texts = request.num_choices * sum(prompt.read is None for prompt in prompts)
                begin = partial(_begun, preparation, make_serializer, outcome)
                begins = (partial(begin, prompt, i) for prompt in prompts for i in range(request.num_choices))
                most = math.inf if model.runtime.max_streams is None else model.runtime.max_streams
                with closing(Choices(begins)) as choices:
                    while len(choices.begun) < most and await choices.begin_next() is not None:
                        pass
                    id = choices.begun[0].serializer.id
                    self._context.running[id] = choices
                    try:
                        outcome.failure = await send_answer(choices, request, send, self._context)
                    finally:
                        del self._context.running[id]
                if outcome.failure is None and model.runtime.reads_when_idle:
                    await preparation.expect_next_turn(choices.begun[0].stream)
        except OutriderError as error:
            raise error_response_of(error, request.prompt_field) from error
        outcome.is_sent = outcome.failure is None and not choices.is_cancelled
        if outcome.failure is not None and not request.stream:
            raise error_response_of(outcome.failure) from outcome.failure


def _begun(
    preparation: Preparation,
    make_serializer: Callable[[BegunAnswer], Serializer],
    outcome: RequestOutcome,
    prompt: PreparedPrompt,
    number: int,
    before: Sequence[Choice],
) -> Choice:
    """Begin answer `number` to a prompt; `outcome` gets its stream. Raises: OutriderError: it cannot begin."""
    model, stream, watch = preparation.model, None, None
    if (read := prompt.read) is not None:
        statistics: Callable[[], Statistics] = lambda: read  # noqa: E731
    else:
        NEW_READER.set(preparation.reader)
        settings, seed = prompt.settings, prompt.settings.seed
        if seed is not None:
            # Answer 0 is the one that a request for a single answer gets.
            settings = attrs.evolve(settings, seed=seed_of_text(seed, number))
        stream = model.runtime.stream(prompt.ids, settings)
        outcome.streams.append(stream)
        statistics = stream.statistics
        watch = partial(model.timelines.watch, session=stream.session, began=stream.began)
    answer = BegunAnswer(
        preparation.request,
        model.name,
        preparation.tokenizer,
        preparation.splitter(stream),
        watch,
        prompt.ids,
        index=len(before),
        counts_prompt=number == 0,
        echo=prompt.echo,
        score=prompt.score,
        first=before[0].serializer if before else None,
        defaults=model.runtime.defaults,
    )
    return Choice(make_serializer(answer), stream, statistics)


# --- sending --------------------------------------------------------------------------------------

# Most tokens of a response, or with log-probabilities of its events, that are made on trio's thread at once: it takes a
# few milliseconds.
SHORT_RESPONSE = 512

# Most tokens of a response, with the likely others that they name, that wait for a client slower than the models; some
# 5 MB. An answer within this bound ends and makes room for the next stream whether or not its client reads.
_MAX_BUFFERED = 2**14


async def send_whole(
    choices: Choices, request: GenerationRequest, send: Send, context: ServerContext
) -> OutriderError | None:
    """Send the response as one body, once all of its generations have ended.

    Returns: the error of a generation, or None; after an error, nothing was sent.
    """
    tokens: defaultdict[int, list[Token]] = defaultdict(list)
    async with _tokens(choices, _MAX_BUFFERED) as (take, failures):
        async for index, token in take:
            tokens[index].append(token)
    if failures:
        return failures[0]
    for index, choice in enumerate(choices.begun):
        choice.finish(tokens[index])
    num_named = request.num_named * sum(map(len, tokens.values()))
    is_long = num_named > SHORT_RESPONSE or request.num_scored is not None
    first = choices.begun[0].serializer

    def make() -> Response:
        return JSONResponse(first.whole_of(choices.begun), headers={first.id_header.decode(): first.id})

    await _send_response(await context.in_thread(make) if is_long else make(), request, send)
    return None


async def _send_response(response: Response, request: RequestBody | GenerationRequest, send: Send) -> None:
    headers = [*response.raw_headers, *request.ignored.raw_headers]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


async def send_events(
    choices: Choices, request: GenerationRequest, send: Send, context: ServerContext
) -> OutriderError | None:
    """Send the response as server-sent events while the tokens arrive.

    Returns: the error of a generation, or None; the error was sent as the last event.
    """
    written_at = trio.current_time()

    async def write(
        events: Callable[[], Iterable[ServerSentEvent]],
        *,
        is_long: bool = False,
        otherwise: str = "",
        is_last: bool = False,
    ) -> None:
        nonlocal written_at

        def make() -> str:
            return "".join(event.encoded() for event in events())

        body = ((await context.in_thread(make) if is_long else make()) or otherwise).encode()
        if body or is_last:
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            written_at = trio.current_time()

    # Events may be long with the log-probabilities of the prompt before an answer, or of the answer at its end.
    has_logprobs = request.num_logprobs is not None
    begun: set[int] = set()  # choices some of whose events were written
    first = choices.begun[0].serializer
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (first.id_header, first.id.encode()),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),  # nginx would collect events before it forwards them
        *request.ignored.raw_headers,
    ]
    max_at_once = max(1, SHORT_RESPONSE // request.num_named)
    async with _tokens(choices, max(1, _MAX_BUFFERED // request.num_named)) as (take, failures):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await write(partial(first.first_events, choices.begun[0].statistics()))
        while (batch := await _batch(take, max_at_once, first.interval_s)) is not None:
            for index, tokens in batch.items():
                choice = choices.begun[index]
                make = partial(choice.serializer.events, tokens, choice.statistics())
                await write(make, is_long=has_logprobs and request.echoes and index not in begun)
                begun.add(index)
            # Also where the text of all tokens is withheld, as that of a long call may be.
            if trio.current_time() - written_at >= first.interval_s:
                idle_events = partial(first.idle_events, choices.begun[0].statistics())
                await write(idle_events, otherwise=": keep-alive\n\n")
    for choice in choices.begun:
        choice.finish(())
    num_named = request.num_named * sum(choice.statistics().generated_tokens for choice in choices.begun)
    is_long = has_logprobs and num_named > SHORT_RESPONSE
    if failures:
        error = error_response_of(failures[0])
        await write(partial(first.error_events, error), is_long=is_long, is_last=True)
        return failures[0]
    await write(partial(first.last_events_of, choices.begun), is_long=is_long, is_last=True)
    return None


_Indexed = tuple[int, Token]


@asynccontextmanager
async def _tokens(
    choices: Choices, max_buffered: int
) -> AsyncIterator[tuple[trio.MemoryReceiveChannel[_Indexed], list[OutriderError]]]:
    """A channel of the tokens of all choices, with the index of the choice, and the errors of their streams."""
    put, take = trio.open_memory_channel[_Indexed](max_buffered)
    failures: list[OutriderError] = []
    async with trio.open_nursery() as nursery:
        with put:
            for index in range(len(choices.begun)):
                nursery.start_soon(_read_in_turn, index, choices, put.clone(), failures)
        yield take, failures


async def _read_in_turn(
    index: int | None, choices: Choices, put: trio.MemorySendChannel[_Indexed], failures: list[OutriderError]
) -> None:
    with put:
        try:
            while index is not None:
                stream = choices.begun[index].stream
                try:
                    if stream is None:
                        await put.send((index, end_without_token(None)))
                    else:
                        async for token in stream:
                            await put.send((index, token))
                except RuntimeClosedError:
                    if not choices.is_cancelled:
                        raise
                    await put.send((index, end_without_token(stream)))
                index = await choices.begin_next()
        except OutriderError as error:
            failures.append(error)
            choices.close()


async def _batch(
    take: trio.MemoryReceiveChannel[_Indexed], max_at_once: int, timeout_s: float
) -> dict[int, list[Token]] | None:
    batch: dict[int, list[Token]] = {}
    try:
        # Waiting for a channel can be cancelled and repeated. A stream cannot be read again after a cancellation.
        with trio.move_on_after(timeout_s):
            index, token = await take.receive()
            batch[index] = [token]
            for _ in range(min(max_at_once - 1, take.statistics().current_buffer_used)):
                index, token = take.receive_nowait()
                batch.setdefault(index, []).append(token)
    except trio.EndOfChannel:
        return None
    return batch


# --- answers that are being generated -------------------------------------------------------------


class EndedAnswer(TypedDict):
    """An answer that ends now: all of it, or its reasoning."""

    id: str
    status: Literal["cancelled", "in_progress"]


async def _end(context: ServerContext, request: Request, *, is_whole: bool) -> Response:
    """End an answer, whole or just its reasoning. Raises: ErrorResponse: none with this id is being generated."""
    id = request.path_params["id"]
    if (choices := context.running.get(id)) is None:
        raise ErrorResponse(404, "there is no such answer, or it has ended by itself", param="id")
    if is_whole:
        choices.cancel()
    else:
        for choice in choices.begun:
            if choice.stream is not None:
                choice.stream.end_thinking()
    return JSONResponse(EndedAnswer(id=id, status="cancelled" if is_whole else "in_progress"))


def endings(path: str, name: str, errors: ErrorForm = COMMON_ERRORS) -> tuple[Operation, ...]:
    """The operations that end answers to requests to a path, which are called `name`."""

    def ending(word: str, summary: str) -> Operation:
        return Operation(
            f"{path}/{{id}}/{word}",
            lambda context: partial(_end, context, is_whole=word == "cancel"),
            f"{word}_{name}",
            summary,
            EndedAnswer,
            method="POST",
            errors=errors,
            statuses=("404",),
        )

    return (
        ending("cancel", f"End a {name} that is being generated, with what there is by now"),
        ending("end_thinking", f"End the reasoning of a {name} that is being generated"),
    )
