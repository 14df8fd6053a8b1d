"""The client of one request, as the application sees it: its address, its body, and whether it is still there."""

from __future__ import annotations

import math
import zlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from starlette.types import Receive, Scope

from runtime.engine.nursery import BackgroundNursery
from runtime.server.errors import ErrorResponse

# Bytes of each body that need no claim, so that a short request never waits for long ones.
FREE_BYTES = 2**14


Claim = Callable[[int], Awaitable[None]]
"""Claims bytes for one body beyond its first `FREE_BYTES`, once there is room for them; to be called once."""


class BodyMemory:
    """A bound on the bytes of all bodies together. Bodies wait for room in the order in which they ask for it.

    A body claims all that it may need at once: two bodies that each held half of the memory could never be completed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._num_free = max_bytes
        self._turn = trio.StrictFIFOLock()
        self._freed = trio.Event()

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """A claim for one body. Its bytes are given back at the end of the block."""
        claimed = 0

        async def claim(num_bytes: int) -> None:
            nonlocal claimed
            async with self._turn:
                while self._num_free < num_bytes:
                    await self._freed.wait()
                claimed = num_bytes
                self._num_free -= claimed

        try:
            yield claim
        finally:
            self._num_free += claimed
            self._freed.set()
            self._freed = trio.Event()


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


def client_address(scope: Scope) -> str:
    """The address of a client, without its port: behind a proxy that is not trusted, the proxy's."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def read_body(scope: Scope, receive: Receive, max_bytes: int, within_s: float, claim: Claim) -> bytes:
    """The body of a request, if all of it arrives within `within_s` seconds, the wait for memory included.

    A compressed body is decompressed while it arrives; `max_bytes` bounds what comes out of it, too.

    Raises:
        ErrorResponse: the body is too long, arrives too slowly, cannot be decompressed, or its content type is not
            JSON; or other bodies took up the memory for all of that time.
        ClientGone: the client has left.

    Cancellation: part of the body may have been received.
    """
    headers = dict(scope["headers"])
    # With any other content type, a browser would let another host's page send the request without asking here first.
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
        raise ErrorResponse(415, "the body must be JSON, and be said to be: send Content-Type: application/json")
    too_long = ErrorResponse(413, f"the body is longer than {max_bytes} bytes; shorten it")
    # A body that says that it is too long is not read. Python refuses to convert very many digits.
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_long
    encoding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
    decompressor = None if encoding in ("", "identity") else _Decompressor(encoding)
    # How long a decompressed body will be is not known.
    most = int(announced) if announced.isdigit() and decompressor is None else max_bytes
    body, num_received, has_room = bytearray(), 0, False
    with trio.move_on_after(within_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            received = message.get("body", b"")
            num_received += len(received)
            if decompressor is None:
                body += received
            else:
                for piece in decompressor.pieces(received):
                    if len(body) > FREE_BYTES and not has_room:
                        await claim(most)
                        has_room = True
                    body += piece
                    if len(body) > max_bytes:
                        break
                    await trio.lowlevel.checkpoint()
            if max(len(body), num_received) > max_bytes:
                raise too_long
            if not message.get("more_body", False):
                if decompressor is not None:
                    decompressor.finish()
                return bytes(body)
            if len(body) > FREE_BYTES and not has_room:
                # The rest is not read until there is room, so its sender has to wait.
                await claim(most)
                has_room = True
    if len(body) > FREE_BYTES and not has_room:
        raise ErrorResponse(
            429,
            f"the bodies of other requests have taken the memory for bodies for {within_s:g} s; try again",
            code="bodies_waiting",
            retry_after_s=math.ceil(within_s),
        )
    raise ErrorResponse(408, f"the body did not come within {within_s:g} s")


# Formats of zlib by the encodings of bodies that are accepted, in addition to "identity".
_ZLIB_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class _Decompressor:
    """A decompressor of one body, which comes in any pieces."""

    def __init__(self, encoding: str) -> None:
        """Raises: ErrorResponse: bodies of this encoding are not accepted."""
        if encoding not in _ZLIB_FORMATS:
            raise ErrorResponse(
                415,
                f"the body's content encoding {encoding[:60]!r} is not accepted; send gzip, deflate, or no encoding",
                headers={"Accept-Encoding": "gzip, deflate"},
            )
        self._encoding, self._format = encoding, _ZLIB_FORMATS[encoding]
        self._zlib: Any = None

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """What the next bytes decompress to, in pieces of at most `FREE_BYTES`.

        Raises: ErrorResponse: the bytes are not of the encoding.
        """
        piece = b""
        # After a whole piece there may be more, although all bytes have been read.
        while data or (len(piece) == FREE_BYTES and not self._zlib.eof):
            if self._zlib is None:
                # Some clients send what "deflate" is called elsewhere, without the header of zlib, which begins so.
                is_bare = self._encoding == "deflate" and data[0] & 0x0F != 8
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else self._format)
            elif self._zlib.eof:
                # The body goes on behind its end: gzip may have several members.
                self._zlib = zlib.decompressobj(self._format)
            try:
                piece = self._zlib.decompress(data, FREE_BYTES)
            except zlib.error as error:
                raise self._invalid(str(error)) from error
            yield piece
            data = self._zlib.unconsumed_tail or self._zlib.unused_data

    def finish(self) -> None:
        """Raises: ErrorResponse: the end of the body is missing."""
        if self._zlib is None or not self._zlib.eof:
            raise self._invalid("its end is missing")

    def _invalid(self, problem: str) -> ErrorResponse:
        return ErrorResponse(400, f"the body is not valid {self._encoding}: {problem}; send it whole, or uncompressed")


async def while_there(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work for a client; cancel it when the client leaves, or its connection is closed as it does not read.

    Raises: ClientGone: the client has left, and the work was cancelled; also what the work raises.
    """

    async def listen() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        there.cancel()

    with trio.CancelScope() as there:
        async with BackgroundNursery() as nursery:
            nursery.start_soon(listen)
            await work()
    if there.cancelled_caught:
        raise ClientGone
