"""The server's connections: HTTP/1.1 and HTTP/1.0 by h11, over trio streams, to an ASGI application.

There is no HTTP/2: one connection could then carry any number of clients that do not read, and no timeout on sending
would notice them, as its flow control is above the socket.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

import attrs
import h11
import trio
from starlette.types import ASGIApp, Message, Scope

from runtime.engine.nursery import BackgroundNursery
from runtime.server.errors import ErrorResponse
from runtime.server.limits import DEFAULT_CONNECTIONS, Limits

logger = logging.getLogger("outrider")

PIECE_BYTES = 2**16
_MAX_HEAD_BYTES = 2**14

# Most bytes of further requests that are kept until the current one is answered. Once they are reached, the connection
# is not read until then, so the server does not notice if the client leaves.
_MAX_PIPELINED_BYTES = 2**16

# A connection that is closed while unread data waits is reset, and an answer such as "too long" would not arrive. So
# after the last answer, the server reads on for a while and throws away what it reads.
_LINGER_S = 2.0
_MAX_LINGER_BYTES = 16 * 2**20

# What a client is told if its request does not reach the application.
_ERRORS = {
    400: "this is not a request of HTTP/1.1",
    431: f"the head of the request is longer than {_MAX_HEAD_BYTES} bytes; shorten it",
    500: "the server has failed; its log has the error",
    501: "the only transfer encoding that is supported is chunked",
    505: "the versions of HTTP that are supported are 1.1 and 1.0",
}

_STREAM_ERRORS = (trio.BrokenResourceError, trio.ClosedResourceError)


@attrs.define(eq=False)
class ClientConnection:
    """One client connection, from its first byte to its last; for the times, see `Limits`."""

    _app: ASGIApp
    _stream: trio.SocketStream
    _stopping: trio.Event  # once it is set, the next response is the last one, and says so
    _stalled_s: float = attrs.field(kw_only=True)
    _idle_s: float = attrs.field(kw_only=True)
    # Called when the connection begins to wait for a request.
    _when_idle: Callable[[ClientConnection], object] = attrs.field(kw_only=True, default=lambda _: None)
    is_idle: bool = attrs.field(init=False, default=True)  # whether no request is being answered
    _http: h11.Connection = attrs.field(
        init=False, factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
    )
    _is_head_request: bool = attrs.field(init=False, default=False)
    _must_close: bool = attrs.field(init=False, default=False)  # after this request
    _sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    # Around the code that is reading from the stream.
    _listening: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _has_left: bool = attrs.field(init=False, default=False)  # the client; true also if it sent what is not HTTP
    _is_broken: bool = attrs.field(init=False, default=False)  # nothing more can be sent

    async def run(self) -> None:
        """Answer the client's requests until it leaves or may send no more; then close the connection.

        Cancellation: cancels the application.
        """
        socket = self._stream.socket
        try:
            with suppress(OSError):  # the client left before its address was read
                addresses = {"client": socket.getpeername()[:2], "server": socket.getsockname()[:2]}
                while (request := await self._next_request()) is not None:
                    await self._answer(request, addresses)
                    is_whole = self._http.our_state is self._http.their_state is h11.DONE
                    if not is_whole or self._has_left:
                        break
                    self._http.start_next_cycle()
                if self._http.our_state is not h11.IDLE and not self._is_broken:
                    await self._linger()
        finally:
            socket.close()

    def retire(self) -> None:
        """Close the connection if no request is being answered."""
        if self.is_idle:
            self._listening.cancel()

    async def _next_request(self) -> h11.Request | None:
        """The head of the next request; None if the client left, was silent, or sent garbage."""
        self._listening = trio.CancelScope(deadline=trio.current_time() + self._idle_s)
        self.is_idle = True
        self._is_head_request = self._must_close = False
        self._when_idle(self)
        try:
            with self._listening:
                while (event := self._http.next_event()) is h11.NEED_DATA:
                    self._http.receive_data(await self._stream.receive_some(PIECE_BYTES))
                if isinstance(event, h11.Request):
                    if event.http_version not in (b"1.0", b"1.1"):
                        raise h11.RemoteProtocolError("another version of HTTP", error_status_hint=505)
                    return event
        except h11.RemoteProtocolError as error:
            await self._send_error(error.error_status_hint)
        except _STREAM_ERRORS:
            pass
        finally:
            self.is_idle = False
        return None

    # --- one request --------------------------------------------------------------------------------

    async def _answer(self, request: h11.Request, addresses: dict[str, Any]) -> None:
        put, take = trio.open_memory_channel[Message](1)
        self._listening = trio.CancelScope()
        self._is_head_request = request.method == b"HEAD"
        # With both headers, a proxy may have taken for one request what others take for two (request smuggling).
        names = {name for name, _ in request.headers}
        self._must_close = {b"content-length", b"transfer-encoding"} <= names
        if self._http.they_are_waiting_for_100_continue:
            await self._send(self._encoded(h11.InformationalResponse(status_code=100, headers=[])))
        # Before the application runs: if the end of the body came together with the head, the answer need not be the
        # last of its connection.
        is_listening = await self._hand_on(put)
        async with BackgroundNursery() as nursery:
            if is_listening:
                nursery.start_soon(self._listen, put)
            await self._call(_scope(request, addresses), take)

    async def _listen(self, put: trio.MemorySendChannel[Message]) -> None:
        with put, self._listening:
            with suppress(*_STREAM_ERRORS):
                while len(self._http.trailing_data[0]) < _MAX_PIPELINED_BYTES:
                    data = await self._stream.receive_some(PIECE_BYTES)
                    self._http.receive_data(data)
                    if not await self._hand_on(put) or not data:
                        break
                else:
                    await trio.sleep_forever()
            self._has_left = True

    async def _hand_on(self, put: trio.MemorySendChannel[Message]) -> bool:
        """Hand the received part of the body to the application.

        Returns: False if it is not HTTP. Then the client is sent an error, and the application is told that it left.
        """
        body, is_last = bytearray(), False
        try:
            # Not beyond the end of the body: h11 takes anything behind a last request for an error.
            while self._http.their_state is h11.SEND_BODY and (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Data):
                    body += event.data
                else:
                    is_last = True
        except h11.RemoteProtocolError as error:
            self._has_left = True
            await self._send_error(error.error_status_hint)
            put.close()
            return False
        if body or is_last:
            await put.send({"type": "http.request", "body": bytes(body), "more_body": not is_last})
        return True

    async def _call(self, scope: Scope, take: trio.MemoryReceiveChannel[Message]) -> None:
        has_body = True

        async def receive() -> Message:
            if self._http.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
                with suppress(trio.EndOfChannel):
                    return await take.receive()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal has_body
            events: list[h11.Event] = []
            if message["type"] == "http.response.start":
                has_body = not self._is_head_request and message["status"] not in (204, 304)
                events.append(self._response(message["status"], list(message.get("headers", ()))))
            else:
                if has_body and (body := message.get("body", b"")):
                    events.append(h11.Data(data=body))
                if not message.get("more_body", False):
                    events.append(h11.EndOfMessage())
            try:
                data = self._encoded(*events)
            except h11.LocalProtocolError:
                # The client was sent an error in place of this answer.
                if self._http.their_state is not h11.ERROR:
                    raise
            else:
                await self._send(data)

        try:
            await self._app(scope, receive, send)
        except Exception:
            logger.exception("a request has failed")
        if not self._has_left:
            await self._send_error(500)

    # --- what is sent -------------------------------------------------------------------------------

    def _response(self, status: int, headers: list[tuple[bytes, bytes]]) -> h11.Response:
        headers.append((b"date", formatdate(usegmt=True).encode()))
        # An answer that precedes the end of its request is the last of its connection, and says so.
        is_early = self._http.their_state in (h11.SEND_BODY, h11.ERROR)
        if is_early or self._must_close or self._stopping.is_set():
            headers.append((b"connection", b"close"))
        return h11.Response(status_code=status, headers=headers)

    async def _send_error(self, status: int) -> None:
        """Send an error, as the last answer, unless an answer has begun."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            kind = "server_error" if status == 500 else "invalid_request_error"
            body = json.dumps(ErrorResponse(status, _ERRORS.get(status, _ERRORS[400]), type=kind).body()).encode()
            self._must_close = True
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            data = [] if self._is_head_request else [h11.Data(data=body)]
            await self._send(self._encoded(self._response(status, headers), *data, h11.EndOfMessage()))

    def _encoded(self, *events: h11.Event) -> bytes:
        return b"".join(self._http.send(event) or b"" for event in events)

    async def _send(self, data: bytes) -> None:
        """Send; if the client has left or does not read, the connection is over."""
        async with self._sending:
            try:
                for start in range(0, len(data), PIECE_BYTES):
                    with trio.fail_after(self._stalled_s):
                        await self._stream.send_all(data[start : start + PIECE_BYTES])
            except (*_STREAM_ERRORS, trio.TooSlowError):
                self._break()
            except trio.Cancelled:
                # Part of the data may have been sent; nothing can follow it.
                self._break()
                raise

    def _break(self) -> None:
        self._is_broken = self._has_left = True
        self._stream.socket.close()
        self._listening.cancel()

    async def _linger(self) -> None:
        """Let the client receive the last answer, though it may still be sending."""
        num_bytes = 0
        with trio.move_on_after(_LINGER_S), suppress(*_STREAM_ERRORS):
            await self._stream.send_eof()
            while num_bytes < _MAX_LINGER_BYTES and (data := await self._stream.receive_some(PIECE_BYTES)):
                num_bytes += len(data)


def _scope(request: h11.Request, addresses: dict[str, Any]) -> Scope:
    headers = list(request.headers)
    if any(name == b"transfer-encoding" for name, _ in headers):
        headers = [(name, value) for name, value in headers if name != b"content-length"]  # it does not count then
    path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": request.http_version.decode(),
        "method": request.method.decode().upper(),
        "scheme": "http",
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "state": {},
        "extensions": {},
        **addresses,
    }


class ConnectionSlots:
    """A limited number of connections; while a client waits for a place, the longest idle one is closed.

    Otherwise a client that opens connections and sends no requests would keep everybody else out.
    """

    def __init__(self, number: int) -> None:
        self._free = trio.Semaphore(number)
        self._keeps_idle = True
        self._connections: dict[ClientConnection, None] = {}  # in the order in which they became idle, if they are idle

    async def take(self) -> None:
        """Wait for a free place and take it, for a connection that then holds it. Cancellation: none is taken."""
        if self._free.value == 0:
            self.close_idle()
        await self._free.acquire()

    @contextmanager
    def holding(self, connection: ClientConnection) -> Iterator[None]:
        """Hold the place that was taken for a connection until the end of the block."""
        self._connections[connection] = None
        try:
            yield
        finally:
            del self._connections[connection]
            self._free.release()

    def close_idle(self) -> None:
        """Close the connection that has been idle for the longest, if there is one; that may be under way already."""
        if longest := next((each for each in self._connections if each.is_idle), None):
            longest.retire()

    def note_idle(self, connection: ClientConnection) -> None:
        """To be called when a connection becomes idle."""
        del self._connections[connection]
        self._connections[connection] = None
        if not self._keeps_idle:
            connection.retire()
        elif self._free.statistics().tasks_waiting:
            self.close_idle()

    def retire_all(self) -> None:
        """Close all idle connections, and from now on each that becomes idle or is added."""
        self._keeps_idle = False
        for connection in self._connections:
            connection.retire()


# Errors of `accept` for a shortage of something in the system, which may pass.
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_RETRY_S = 0.1
_WARNING_INTERVAL_S = 60.0


async def serve(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    until: Callable[[], Awaitable[object]],
    limits: Limits,
    drain: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint,
) -> None:
    """Serve an ASGI application over HTTP/1.1 and HTTP/1.0; the listeners are closed in the end.

    Once `until` returns, the server drains: connections are still accepted, so that a load balancer hears from the
    application that the server stops, but each response is the last of its connection. Once `drain` returns, no
    connection is accepted, idle ones are closed, and the others end with their response. `limits.grace_s` bounds all of
    it.

    Cancellation: closes all connections.
    """
    stopping = trio.Event()
    slots = ConnectionSlots(limits.max_connections or DEFAULT_CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        connection = ClientConnection(
            app, stream, stopping, stalled_s=limits.stalled_s, idle_s=limits.idle_s, when_idle=slots.note_idle
        )
        with slots.holding(connection):
            try:
                await connection.run()
            except Exception:  # a failure of one connection must not affect the others
                logger.exception("a connection has failed")

    async def accept(listener: trio.SocketListener) -> None:
        next_warning_s = 0.0  # on trio's clock
        async with listener:
            while True:
                try:
                    # Accepted before it has a place: only then is it known that a client waits for one.
                    stream = await listener.accept()
                except OSError as error:
                    if error.errno not in _SHORTAGES:
                        raise
                    if (now := trio.current_time()) >= next_warning_s:
                        next_warning_s = now + _WARNING_INTERVAL_S
                        message = "new connections cannot be accepted: %s; idle ones are closed meanwhile"
                        logger.warning(message, error.strerror)
                    slots.close_idle()
                    await trio.sleep(_RETRY_S)
                    continue
                try:
                    await slots.take()
                except BaseException:
                    stream.socket.close()
                    raise
                handlers.start_soon(handle, stream)

    async with trio.open_nursery() as handlers:
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(accept, listener)
            await until()
            stopping.set()
            handlers.cancel_scope.deadline = trio.current_time() + limits.grace_s
            await drain()
            accepting.cancel_scope.cancel()
        slots.retire_all()
