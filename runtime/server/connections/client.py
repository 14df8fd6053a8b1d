"""A client: what it says, and whether it is there to hear the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import trio
from starlette.types import Message, Receive, Scope, Send

from runtime.server.errors import ErrorResponse

# Bytes of a body for which a client is waited for; a longer one is sent in pieces.
_MOST_AT_ONCE = 2**16


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


def client_address(scope: Scope) -> str:
    """The address of a client, without its port: behind a proxy, the proxy's."""
    client = scope.get("client")
    return "" if client is None else str(client[0])


async def read_body(scope: Scope, receive: Receive, max_bytes: int, within_s: float) -> bytes:
    """The body of a request.

    Args:
        scope, receive: ASGI's.
        max_bytes: that it may have.
        within_s: seconds within which it must have come.

    Raises:
        Refusal: it is too long, takes too long, or is not said to be JSON.
        ClientGone: the client has left.
    """
    headers = dict(scope["headers"])
    # A page of another host can make a browser send anything but this without asking.
    if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
        raise ErrorResponse(415, "the body must be JSON, and be said to be: send Content-Type: application/json")
    too_long = ErrorResponse(413, f"the body is longer than {max_bytes} bytes; shorten it")
    # Not read to its end: whoever sends too much is not waited for. Of too many digits Python makes no number.
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > max_bytes):
        raise too_long
    body = bytearray()
    with trio.move_on_after(within_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_long
            if not message.get("more_body", False):
                return bytes(body)
    raise ErrorResponse(408, f"the body did not come within {within_s:g} s")


async def while_there(receive: Receive, send: Send, stalled_s: float, work: Callable[[Send], Awaitable[None]]) -> None:
    """Do some work for a client as long as it is there, and takes what it is sent.

    Args:
        receive, send: ASGI's.
        stalled_s: seconds that it may leave something unread; 64 KiB of it, where it is longer.
        work: is given a `send` that sees to that.

    Raises:
        ClientGone: it has left, and the work was cancelled.
        Refusal: the work raised it.
    """
    is_gone = False
    refused: ErrorResponse | None = None

    def leave() -> None:
        nonlocal is_gone
        is_gone = True
        nursery.cancel_scope.cancel()

    async def hear() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    async def send_patiently(message: Message) -> None:
        for piece in _pieces(message):
            with trio.move_on_after(stalled_s) as patience:
                await send(piece)
            if patience.cancelled_caught:
                leave()
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hear)
        # Kept, not let through: the nursery would wrap it in a group.
        try:
            await work(send_patiently)
        except ErrorResponse as refusal:
            refused = refusal
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused
    if is_gone:
        raise ClientGone


def _pieces(message: Message) -> Iterator[Message]:
    """A message as one or several: who reads slowly is not to be cut off for the length of what there is to read."""
    body = message.get("body", b"")
    last = max(0, len(body) - 1) // _MOST_AT_ONCE * _MOST_AT_ONCE
    for at in range(0, last, _MOST_AT_ONCE):
        yield {**message, "body": body[at : at + _MOST_AT_ONCE], "more_body": True}
    yield {**message, "body": body[last:]} if last else message
