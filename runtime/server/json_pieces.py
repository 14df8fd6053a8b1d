"""JSON that is encoded in pieces, so that no piece keeps other threads waiting for long."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

# Values that are encoded in one call, which holds the GIL, and with it every other thread: below a millisecond.
_MAX_AT_ONCE = 1000

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# For events, which clients may split at Unicode's line separators.
encode_ascii = json.JSONEncoder(separators=(",", ":")).encode


def json_pieces(value: Any, encode: Callable[[Any], str] = _encode) -> Iterator[str]:
    """The JSON of a value, in pieces that are each encoded in a short time, unless one text in it is very long."""
    if not isinstance(value, (dict, list, tuple)) or _num_values(value, _MAX_AT_ONCE) <= _MAX_AT_ONCE:
        yield encode(value)
    elif isinstance(value, dict):
        for i, (name, part) in enumerate(value.items()):
            yield f"{',' if i else '{'}{encode(name)}:"
            yield from json_pieces(part, encode)
        yield "}"
    else:
        for i, part in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(part, encode)
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
