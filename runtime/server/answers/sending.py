"""Responses sent to a client: as one body, or as server-sent events while the tokens arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import trio
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from protocol.errors import OutriderError, RuntimeClosedError
from runtime.generation.tokens import Token
from runtime.server.answers.api import Choices, Event, end_without_token
from runtime.server.answers.request import GenerationRequest
from runtime.server.errors import error_response_of

# Most tokens of a response, or with log-probabilities of its events, that are made on trio's thread at once: it takes a
# few milliseconds.
SHORT_RESPONSE = 512

InThread = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Runs a function in another thread; see `ServerContext.in_thread`."""

# Most tokens of a response, with the likely others that they name, that wait for a client slower than the models; some
# 5 MB. An answer within this bound ends and makes room for the next stream whether or not its client reads.
_MAX_BUFFERED = 2**14

_EVENT_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events before it forwards them
]


async def send_whole(
    choices: Choices, request: GenerationRequest, send: Send, in_thread: InThread
) -> OutriderError | None:
    """Send the response as one body, once all of its generations have ended.

    Returns: the error of a generation, or None; after an error, nothing was sent.

    Cancellation: ends the streams; the body may have been sent in part.
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
    whole = partial(first.whole_of, choices.begun)
    body = await _made(lambda: bytes(JSONResponse(whole()).body), is_long, in_thread)
    headers = {first.id_header.decode(): first.id}
    response = Response(body, media_type="application/json", headers=headers)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return None


async def _made(make: Callable[[], bytes], is_long: bool, in_thread: InThread) -> bytes:
    return await in_thread(make) if is_long else make()


async def send_events(
    choices: Choices, request: GenerationRequest, send: Send, in_thread: InThread
) -> OutriderError | None:
    """Send the response as server-sent events while the tokens arrive.

    Args:
        choices: its generations, the first of which have begun; their serializers make the events.

    Returns: the error of a generation, or None; the error was sent as the last event.

    Cancellation: ends the streams; an event may have been sent in part.
    """
    written_at = trio.current_time()

    async def write(
        events: Callable[[], Iterable[Event]], *, is_long: bool = False, otherwise: str = "", is_last: bool = False
    ) -> None:
        nonlocal written_at
        made = await _made(lambda: "".join(event.encoded() for event in events()).encode(), is_long, in_thread)
        body = made or otherwise.encode()
        if body or is_last:
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            written_at = trio.current_time()

    # Events may be long with the log-probabilities of the prompt before an answer, or of the answer at its end.
    has_logprobs = request.num_logprobs is not None
    num_introduced = 0
    echoing: set[int] = set()  # choices whose next events begin with the prompt

    async def introduce() -> None:
        """Write the first events of the choices that have begun since the last call, one choice after the other."""
        nonlocal num_introduced
        while num_introduced < len(choices.begun):
            index, choice = num_introduced, choices.begun[num_introduced]
            num_introduced += 1
            if request.echoes:
                echoing.add(index)
            await write(partial(choice.serializer.first_events, choice.statistics()))

    first = choices.begun[0].serializer
    headers = [(b"content-type", first.content_type), (first.id_header, first.id.encode()), *_EVENT_HEADERS]
    max_at_once = max(1, SHORT_RESPONSE // request.num_named)
    async with _tokens(choices, max(1, _MAX_BUFFERED // request.num_named)) as (take, failures):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await introduce()
        while (batch := await _batch(take, max_at_once, first.interval_s)) is not None:
            await introduce()
            for index, tokens in batch.items():
                choice = choices.begun[index]
                make = partial(choice.serializer.events, tokens, choice.statistics())
                await write(make, is_long=has_logprobs and index in echoing)
                echoing.discard(index)
            # Also where the text of all tokens is withheld, as that of a long call may be.
            if trio.current_time() - written_at >= first.interval_s:
                idle_events = partial(first.idle_events, choices.begun[0].statistics())
                await write(idle_events, otherwise=first.keep_alive)
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
                if (stream := choices.begun[index].stream) is not None:
                    try:
                        async for token in stream:
                            await put.send((index, token))
                    except RuntimeClosedError:
                        if not choices.is_cancelled:
                            raise
                        await put.send((index, end_without_token(stream)))
                else:
                    await put.send((index, end_without_token(None)))
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
