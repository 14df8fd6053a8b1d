"""The JSON of a response, made without holding up the responses of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.server.fair_threads import FairThreads

# Tokens of a response that is made at once on trio's thread: with log-probabilities, in a few milliseconds.
SHORT_RESPONSE = 512
# Values that are encoded in one call, which holds the GIL, and with it every other thread: below a millisecond.
_MAX_AT_ONCE = 1000

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def encoded_aside(
    make: Callable[[], Mapping[str, Any]], num_tokens: int, threads: FairThreads, client: str
) -> bytes:
    """The JSON of a response.

    Args:
        make: makes the response; runs in another thread where that is long, and so must not touch what others use.
        num_tokens: tokens that the response has, with the likely others that it names.
        threads: do what is long.
        client: the client's address; see `FairThreads.run`.

    Cancellation: as of `FairThreads.run`.
    """

    def encoded() -> bytes:
        return "".join(json_pieces(make())).encode()

    return encoded() if num_tokens <= SHORT_RESPONSE else await threads.run(encoded, num_tokens, client)


def json_pieces(value: Any) -> Iterator[str]:
    """The JSON of a value, in pieces that are each encoded in a short time, unless one text in it is very long.

    Args:
        value: of objects, lists and what else JSON has; no object is in itself.
    """
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
    """How many values a value consists of, itself included; where that is more than `most`, any number above it."""
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
