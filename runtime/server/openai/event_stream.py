"""Responses sent to a client: as one body, or as server-sent events while the tokens arrive."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import trio
from starlette.responses import JSONResponse
from starlette.types import Send

from protocol.errors import OutriderError
from protocol.statistics import Statistics
from runtime.generation.token_reader import Token
from runtime.generation.token_stream import TokenStream
from runtime.server.errors import error_response_of
from runtime.server.openai.requests import Request
from runtime.server.openai.responses import Speculation, SpeculationStatistics
from runtime.server.openai.serializers import Serializer
from runtime.server.timelines import Timeline

# Tokens that may wait for the network, in addition to the rounds that a stream buffers.
_BUFFERED_TOKENS = 16

# The longest time between two events: with speculation, a chunk; without, a comment that keeps the connection alive.
_SPECULATION_INTERVAL_S = 0.25
_KEEP_ALIVE_S = 15.0

_EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events before it forwards them
]


async def send_whole(stream: TokenStream, serializer: Serializer, send: Send) -> OutriderError | None:
    """Send the response as one body.

    Returns: the error of the generation, or None; after an error, nothing was sent.

    Cancellation: ends the stream; the body may have been sent in part.
    """
    try:
        tokens = [token async for token in stream]
    except OutriderError as error:
        return error
    response = JSONResponse(serializer.whole(tokens, stream.statistics()))
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return None


async def send_events(
    request: Request, stream: TokenStream, serializer: Serializer, timeline: Timeline | None, send: Send
) -> OutriderError | None:
    """Send the response as server-sent events while the tokens arrive.

    Args:
        request: the request.
        stream: its generation.
        serializer: makes the chunks.
        timeline: the models' activity for the stream, for a client that asked for speculation; else None.
        send: of ASGI.

    Returns: the error of the generation, or None; the error was sent as the last event.

    Cancellation: ends the stream; an event may have been sent in part.
    """

    async def write(text: str, *, is_last: bool = False) -> None:
        await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

    async def write_chunk(tokens: list[Token]) -> None:
        chunks = serializer.chunks(tokens)
        if timeline is not None:
            for i, chunk in enumerate(chunks):
                # The tokens came with the first; a chunk that only ends the text has none.
                chunk["speculation"] = _speculation([] if i else tokens, stream.statistics(), timeline)
        await write("".join(map(_event, chunks)))

    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM_HEADERS})
    put, take = trio.open_memory_channel[Token](_BUFFERED_TOKENS)
    failures: list[OutriderError] = []
    interval_s = _KEEP_ALIVE_S if timeline is None else _SPECULATION_INTERVAL_S
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_read, stream, put, failures)
        # The first chunk is empty: it tells the client at once that the request was accepted, and the response's id.
        await write_chunk([])
        while (tokens := await _batch(take, interval_s)) is not None:
            if tokens or timeline is not None:
                await write_chunk(tokens)
            else:
                await write(": keep-alive\n\n")
    if failures:
        await write(_event(error_response_of(failures[0]).body()), is_last=True)
        return failures[0]
    usage = _event(serializer.last_chunk(stream.statistics())) if request.usage else ""
    await write(usage + "data: [DONE]\n\n", is_last=True)
    return None


async def _read(stream: TokenStream, put: trio.MemorySendChannel[Token], failures: list[OutriderError]) -> None:
    """Move a stream's tokens into a channel; append the stream's error, if any, to `failures`."""
    with put:
        try:
            async for token in stream:
                await put.send(token)
        except OutriderError as error:
            failures.append(error)


async def _batch(take: trio.MemoryReceiveChannel[Token], timeout_s: float) -> list[Token] | None:
    """All tokens that have arrived, after waiting for the first; [] after the timeout, None at the end."""
    try:
        # Waiting for a channel can be cancelled and repeated. A stream cannot be read again after a cancellation.
        with trio.move_on_after(timeout_s):
            tokens = [await take.receive()]
            while take.statistics().current_buffer_used:
                tokens.append(take.receive_nowait())
            return tokens
    except trio.EndOfChannel:
        return None
    return []


def _speculation(tokens: Iterable[Token], statistics: Statistics, timeline: Timeline) -> Speculation:
    so_far: SpeculationStatistics = {
        "prompt_tokens": statistics.prompt_tokens,
        "cached_tokens": statistics.cached_tokens,
        "prefilled_tokens": statistics.prefilled_tokens,
        "generated_tokens": statistics.generated_tokens,
        "proposed": statistics.proposed,
        "accepted": statistics.accepted,
        "acceptance_rate": statistics.acceptance_rate,
        "rows_per_pass": statistics.rows_per_pass,
        "generation_tps": statistics.generation_tps,
        "time_to_first_token": statistics.time_to_first_token,
        "elapsed": statistics.elapsed,
    }
    return {
        "tokens": [
            {"id": token.id, "text": token.text, "from_draft": token.from_draft, "is_thinking": token.is_thinking}
            for token in tokens
        ],
        "statistics": so_far,
        **timeline.new_activity(),
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
