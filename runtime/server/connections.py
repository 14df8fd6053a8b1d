"""Connections: hypercorn speaks HTTP; how many there are, and how long one may hold on, is decided here.

Hypercorn shields what it sends from cancellation, and waits for whoever does not read; so patience has to end below it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import LifespanState

logger = logging.getLogger("outrider")

# What a client still sends when it has its answer is read and thrown away for a while: closed upon unread data, a
# connection is reset, and an answer that says "too long" would not arrive.
_LINGER_S = 2.0
_MOST_LINGERING = 16 * 2**20


@attrs.frozen
class Patience:
    """How much is borne with.

    Attributes:
        max_connections: at a time, >= 1; others wait to be accepted.
        stalled_s: seconds that a client may leave what it is sent unread.
        idle_s: seconds that a connection may be open without a request.
        grace_s: seconds that answers may take to come to their end when the server stops.
    """

    max_connections: int = 1000
    stalled_s: float = 60.0
    idle_s: float = 30.0
    grace_s: float = 5.0


async def serve(
    app: Any,
    listeners: Sequence[trio.SocketListener],
    until: Callable[[], Awaitable[object]],
    patience: Patience,
) -> None:
    """Serve an ASGI application.

    Args:
        app: the application.
        listeners: that are listening; closed in the end.
        until: returns when no more connections are to be taken.
        patience: with clients.

    Cancellation: closes all connections.
    """
    config = Config()
    config.errorlog = logger
    config.keep_alive_timeout = patience.idle_s
    config.include_server_header = False
    context = WorkerContext(None)
    places = trio.Semaphore(patience.max_connections)
    streams: set[BoundedStream] = set()
    doors = [_Door(listener, places, streams, patience.stalled_s) for listener in listeners]
    converse = partial(_converse, ASGIWrapper(app), config, context)
    async with trio.open_nursery() as connections:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, converse, doors, handler_nursery=connections))
            await until()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        with trio.move_on_after(patience.grace_s):
            while streams:
                await next(iter(streams)).closed.wait()
        for stream in list(streams):
            stream.abort()
        connections.cancel_scope.cancel()


async def _converse(app: ASGIWrapper, config: Config, context: WorkerContext, stream: BoundedStream) -> None:
    # Whatever one client can bring about, the others are not to know of it.
    try:
        await TCPServer(app, config, context, LifespanState({}), stream)  # type: ignore[arg-type]
    except Exception:
        logger.exception("a connection has failed")
    finally:
        stream.abort()


class BoundedStream(trio.abc.HalfCloseableStream):
    """A connection that ends where its client does not read.

    Attributes:
        closed: when it is over.
    """

    def __init__(self, inner: trio.SocketStream, stalled_s: float, on_closed: Callable[[BoundedStream], None]) -> None:
        """Over a connection that is open.

        Args:
            inner: the connection.
            stalled_s: seconds that what is sent may remain unread.
            on_closed: called once.
        """
        self.socket = inner.socket  # hypercorn asks it for addresses
        self.closed = trio.Event()
        self._inner = inner
        self._stalled_s = stalled_s
        self._on_closed = on_closed
        self._has_sent_all = self._is_at_end = False
        self._num_lingering = 0
        self._at_end = trio.Event()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send everything.

        Raises: trio.BrokenResourceError: the client has gone, or has read nothing for too long.
        """
        # Inside of whatever shield is around it.
        with trio.move_on_after(self._stalled_s) as patience:
            await self._inner.send_all(data)
        if patience.cancelled_caught:
            self.abort()
            raise trio.BrokenResourceError("the client does not read what it is sent")

    async def wait_send_all_might_not_block(self) -> None:
        """See trio."""
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come; nothing where nothing more comes, or is of interest."""
        while True:
            data = bytes(await self._inner.receive_some(max_bytes))
            if not self._has_sent_all:
                return data
            self._num_lingering += len(data)
            if not data or self._num_lingering > _MOST_LINGERING:
                self._at_end.set()
                return b""

    async def send_eof(self) -> None:
        """Say that nothing more comes; what still does is thrown away."""
        self._has_sent_all = True
        await self._inner.send_eof()

    async def aclose(self) -> None:
        """Close, once the client has heard all that it was told, or had the time for it."""
        if self._has_sent_all and not self.closed.is_set():
            with trio.move_on_after(_LINGER_S):
                await self._at_end.wait()
        self.abort()
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        """Close at once; twice is once."""
        if not self.closed.is_set():
            self.closed.set()
            self._at_end.set()
            self.socket.close()
            self._on_closed(self)


class _Door(trio.abc.Listener[BoundedStream]):
    """Lets so many in at a time."""

    def __init__(
        self, listener: trio.SocketListener, places: trio.Semaphore, streams: set[BoundedStream], stalled_s: float
    ) -> None:
        self.socket = listener.socket
        self._listener = listener
        self._places = places
        self._streams = streams
        self._stalled_s = stalled_s

    async def accept(self) -> BoundedStream:
        await self._places.acquire()
        try:
            inner = await self._listener.accept()
        except BaseException:
            self._places.release()
            raise
        stream = BoundedStream(inner, self._stalled_s, self._leave)
        self._streams.add(stream)
        return stream

    async def aclose(self) -> None:
        await self._listener.aclose()

    def _leave(self, stream: BoundedStream) -> None:
        self._streams.discard(stream)
        self._places.release()
