"""One connection: hypercorn speaks HTTP, and what it is spoken over is here.

Hypercorn's own server shields what it sends, hears nothing of a client whose next request has come already, and waits
for ever to tell an application that has answered of the rest of its request; each lets a client hold on to the models
or to the connection itself. So of hypercorn there are its protocol and its context, and not its server; nor HTTP/2,
by which one connection could be any number of clients that do not read.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

logger = logging.getLogger("outrider")

_MOST_AT_ONCE = 2**16

# Messages of a request that wait for the application.
_MOST_WAITING = 4

# What a client still sends when it has its answer is read and thrown away for a while: closed upon unread data, a
# connection is reset, and an answer that says "too long" would not arrive.
_LINGER_S = 2.0
_MOST_LINGERING = 16 * 2**20

# Of a request of which more is to come, or would have.
_NOT_WHOLE = (h11.SEND_BODY, h11.ERROR)


class Connection:
    """A client's connection, from its first byte to its last."""

    def __init__(
        self,
        app: Any,
        stream: trio.SocketStream,
        context: WorkerContext,
        *,
        stalled_s: float,
        idle_s: float,
    ) -> None:
        """Open, and not listened to yet.

        Args:
            app: the ASGI application that answers.
            stream: closed in the end.
            context: of the server; once that is terminated, no further request is answered.
            stalled_s: seconds that the client may leave what it is sent unread; 64 KiB of it, where it is longer.
            idle_s: seconds that it may leave the server without a request.
        """
        self._app = app
        self._stream = stream
        self._context = context
        self._stalled_s = stalled_s
        self._idle_s = idle_s
        self._sending = trio.Lock()
        self._listening = trio.CancelScope()
        self._ahead = bytearray()  # what came before the request before was answered
        self._is_idle = True
        self._is_answered = False  # all of it, and nothing more is

    async def run(self) -> None:
        """Answer what the client asks, for as long as it is there.

        Cancellation: ends the answer that is under way, and closes the connection.
        """
        try:
            with suppress(OSError):  # gone before it was looked at
                await self._run()
        finally:
            self._stream.socket.close()

    def retire(self) -> None:
        """Wait for no further request."""
        if self._is_idle:
            self._listening.cancel()

    async def _run(self) -> None:
        socket = self._stream.socket
        client = parse_socket_addr(socket.family, socket.getpeername())
        server = parse_socket_addr(socket.family, socket.getsockname())
        async with trio.open_nursery() as nursery:
            self._protocol = _HTTP1(
                self._app,
                _config(),
                self._context,
                _Applications(nursery),  # type: ignore[arg-type]
                ConnectionState({}),
                False,
                client,
                server,
                self._on_event,
            )
            self._protocol.can_read = _Pause(self._listen_ahead)
            self._set_idle(True)
            with self._listening:
                await self._listen()
            # The client has left, was silent for too long, or has its last answer. Whoever works for it hears of that.
            await self._protocol.handle(Closed())
        if self._is_answered:
            await self._linger()

    async def _listen(self) -> None:
        """Hand on what comes; returns when nothing more does."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                data, self._ahead = bytes(self._ahead), bytearray()
                data = data or bytes(await self._stream.receive_some(_MOST_AT_ONCE))
                await self._protocol.handle(RawData(data))
                if not data:
                    return

    async def _listen_ahead(self) -> None:
        """Hear whether the client leaves, though it has sent another request; unless that is a very long one."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while data := await self._stream.receive_some(_MOST_AT_ONCE):
                self._ahead += data
                if len(self._ahead) >= _MOST_AT_ONCE:
                    return
        self._listening.cancel()

    async def _on_event(self, event: Event) -> None:
        """Do what the protocol says."""
        if isinstance(event, RawData):
            await self._send(event.data)
        elif isinstance(event, Updated):
            self._set_idle(event.idle)
        elif isinstance(event, Closed):
            self._is_answered = True
            self._listening.cancel()

    def _set_idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle
        self._listening.deadline = trio.current_time() + self._idle_s if is_idle else math.inf

    async def _send(self, data: bytes) -> None:
        """Send; where the client is not there any more, or does not read, the connection is over."""
        async with self._sending:
            try:
                # In pieces: who reads slowly is not to be cut off for the length of what there is to read.
                for at in range(0, len(data), _MOST_AT_ONCE):
                    with trio.fail_after(self._stalled_s):
                        await self._stream.send_all(data[at : at + _MOST_AT_ONCE])
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                self._break()
            except trio.Cancelled:
                # Nothing can follow what may be half of something.
                self._break()
                raise

    def _break(self) -> None:
        self._stream.socket.close()
        self._listening.cancel()

    async def _linger(self) -> None:
        """Have the client hear all that it was told, though it may not have said all that it has to say."""
        num_lingering = 0
        with trio.move_on_after(_LINGER_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_eof()
            while num_lingering < _MOST_LINGERING and (data := await self._stream.receive_some(_MOST_AT_ONCE)):
                num_lingering += len(data)


class _Pause:
    """Lasts until a request is answered, if another one came before that; meanwhile something else can be done."""

    def __init__(self, meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._meanwhile = meanwhile
        self._over = trio.Event()

    async def clear(self) -> None:
        self._over = trio.Event()

    async def set(self) -> None:
        self._over.set()

    def is_set(self) -> bool:
        return self._over.is_set()

    async def wait(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._meanwhile)
            await self._over.wait()
            nursery.cancel_scope.cancel()


class _HTTP1(H11Protocol):
    """HTTP/1.1 and HTTP/1.0, and no other protocol that a client would rather have."""

    async def _check_protocol(self, event: h11.Request) -> None:
        pass

    async def _create_stream(self, request: h11.Request) -> None:
        if request.http_version not in (b"1.0", b"1.1"):
            await self._send_error_response(505)
            await self.send(Closed())
            return
        others = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"upgrade"]
        await super()._create_stream(
            h11.Request(method=request.method, target=request.target, headers=others, http_version=request.http_version)
        )

    async def stream_send(self, event: StreamEvent) -> None:
        # Answered before all of it has come, a request is the last of its connection, and the client is to know.
        if isinstance(event, Response) and self.connection.their_state in _NOT_WHOLE:
            headers = [*event.headers, (b"connection", b"close")]
            event = Response(stream_id=event.stream_id, headers=headers, status_code=event.status_code)
        await super().stream_send(event)


class _Applications:
    """Has the application answer requests; what hypercorn calls a group of tasks."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery

    async def spawn_app(self, app: Any, config: Config, scope: Any, send: Any) -> Any:
        """Returns: what messages of the request are to be handed to."""
        put, take = trio.open_memory_channel[Any](_MOST_WAITING)

        async def hand_in(message: Any) -> None:
            if message["type"] == "http.disconnect":
                # Never waits: it may come from the application's own task, and from any when nobody listens any more.
                put.close()
            else:
                with suppress(trio.ClosedResourceError):
                    # Not in turn with others where it need not: of a body that has come with its head, the end is to
                    # be seen before the request is answered, or that would have to be the last of its connection.
                    try:
                        put.send_nowait(message)
                    except trio.WouldBlock:
                        await put.send(message)

        async def receive() -> Any:
            try:
                return await take.receive()
            except trio.EndOfChannel:
                return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await app(scope, receive, send)
            except Exception:
                logger.exception("a request has failed")
            # That it has finished: with 500, where it has not begun.
            await send(None)

        self._nursery.start_soon(answer)
        return hand_in


@functools.cache
def _config() -> Config:
    """One for all connections."""
    config = Config()
    config.errorlog = logger
    config.include_server_header = False
    return config
