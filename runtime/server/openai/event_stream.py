"""A stream of tokens to bytes: an answer as one body, or as it comes, by server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import trio
from starlette.responses import JSONResponse
from starlette.types import Send

from protocol.errors import OutriderError
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import TokenStream
from runtime.server.errors import error_response_of
from runtime.server.openai.requests import Request
from runtime.server.openai.responses import DraftedToken, SoFar
from runtime.server.openai.serializers import Serializer
from runtime.server.timelines import Record

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


async def send_whole(stream: TokenStream, writer: Serializer, send: Send) -> OutriderError | None:
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


async def send_as_it_comes(
    request: Request, stream: TokenStream, writer: Serializer, record: Record | None, send: Send
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
        await write(_event(error_response_of(failures[0]).body()), is_last=True)
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
    so_far = {name: getattr(statistics, name) for name in SoFar.model_fields}
    drafted = [{name: getattr(token, name) for name in DraftedToken.model_fields} for token in tokens]
    return {**chunk, "speculation": {"tokens": drafted, "statistics": so_far, **record.news()}}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
