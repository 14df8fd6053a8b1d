"""Responses sent to a client: as one body, or as server-sent events while the tokens arrive."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import Send

from protocol.errors import OutriderError
from runtime.generation.token_reader import Token
from runtime.server.answers.api import Choice, Choices, Event
from runtime.server.errors import error_response_of
from runtime.server.fair_threads import FairThreads

# Most tokens of a response that is made on trio's thread: with log-probabilities, it takes a few milliseconds.
SHORT_RESPONSE = 512
# Most values encoded in one call, which holds the GIL and so stops every other thread: below a millisecond.
_MAX_AT_ONCE = 1000

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def encoded_aside(
    make: Callable[[], Mapping[str, Any]], num_tokens: int, threads: FairThreads, client: str
) -> bytes:
    """The JSON of a response, made by `make`: in another thread if it names more than `SHORT_RESPONSE` tokens.

    Cancellation: as for `FairThreads.run`.
    """

    def encoded() -> bytes:
        return "".join(json_pieces(make())).encode()

    return encoded() if num_tokens <= SHORT_RESPONSE else await threads.run(encoded, num_tokens, client)


def json_pieces(value: Any) -> Iterator[str]:
    """The JSON of a value, in pieces that are each encoded in a short time, unless one text in it is very long."""
    if not isinstance(value, (dict, list, tuple)) or _num_values(value, _MAX_AT_ONCE) <= _MAX_AT_ONCE:
        yield _encode(value)
    elif isinstance(value, dict):
        for i, (name, part) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_encode(name)}:"
            yield from json_pieces(part)
        yield "}"
    else:
        for i, part in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(part)
        yield "]"


def _num_values(value: Any, most: int) -> int:
    """The number of values in a value, itself included; if there are more than `most`, any number above `most`."""
    num, waiting = 0, [value]
    while waiting and num <= most:
        num += len(waiting)
        parts: list[Any] = []
        for each in waiting:
            if isinstance(each, dict):
                parts += each.values()
            elif isinstance(each, (list, tuple)):
                parts += each
        waiting = parts
    return num


# Most tokens of a response, with the likely others that they name, that wait for a client slower than the models; some
# 5 MB. An answer within this bound ends and makes room for the next stream whether or not its client reads.
_MAX_BUFFERED = 2**14

_EVENT_HEADERS = [
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events before it forwards them
]


async def send_whole(
    choices: Choices, body_of: Callable[[Sequence[Choice]], Awaitable[bytes]], send: Send
) -> OutriderError | None:
    """Send the response as one body, once all of its generations have ended; `body_of` makes it.

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
    response = Response(await body_of(choices.begun), media_type="application/json")
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})
    return None


async def send_events(choices: Choices, num_named: int, send: Send) -> OutriderError | None:
    """Send the response as server-sent events while the tokens arrive.

    Args:
        choices: its generations, the first of which have begun; their serializers make the events.
        num_named: 1 for each token, and 1 for each likely other that comes with it.

    Returns: the error of a generation, or None; the error was sent as the last event.

    Cancellation: ends the streams; an event may have been sent in part.
    """

    async def write(events: Iterable[Event], *, otherwise: str = "", is_last: bool = False) -> None:
        text = "".join(event.encoded() for event in events) or otherwise
        if text or is_last:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": not is_last})

    num_introduced = 0

    async def introduce() -> None:
        """Write the first events of the choices that have begun since the last call, one choice after the other."""
        nonlocal num_introduced
        while num_introduced < len(choices.begun):
            choice = choices.begun[num_introduced]
            num_introduced += 1
            await write(choice.serializer.first_events(choice.statistics()))

    first = choices.begun[0].serializer
    headers = [(b"content-type", first.content_type), *_EVENT_HEADERS]
    max_at_once = max(1, SHORT_RESPONSE // num_named)
    async with _tokens(choices, max(1, _MAX_BUFFERED // num_named)) as (take, failures):
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await introduce()
        while (batch := await _batch(take, max_at_once, first.interval_s)) is not None:
            await introduce()
            for index, tokens in batch.items():
                choice = choices.begun[index]
                await write(choice.serializer.events(tokens, choice.statistics()))
            if not batch:
                await write(first.idle_events(choices.begun[0].statistics()), otherwise=first.keep_alive)
    if failures:
        statistics = choices.begun[0].statistics()
        await write(first.error_events(error_response_of(failures[0]), statistics), is_last=True)
        return failures[0]
    await introduce()  # those for which nothing was generated
    await write(first.last_events_of(choices.begun), is_last=True)
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
                    async for token in stream:
                        await put.send((index, token))
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
