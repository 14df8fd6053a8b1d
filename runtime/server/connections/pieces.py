"""Bytes sent in pieces, each within a timeout: a client may read a long body slowly, but not stop reading."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

PIECE_BYTES = 2**16


async def send_in_pieces(send: Callable[[bytes, bool], Awaitable[None]], data: bytes, timeout_s: float) -> None:
    """Send bytes in pieces of at most 64 KiB; no bytes are one empty piece.

    Args:
        send: sends a piece; its second argument says whether the piece is the last one.
        data: the bytes.
        timeout_s: seconds that one piece may take.

    Raises: trio.TooSlowError: a piece took longer; it may have been sent in part.

    Cancellation: a piece may have been sent in part.
    """
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        end = start + PIECE_BYTES
        with trio.fail_after(timeout_s):
            await send(data[start:end], end >= len(data))
