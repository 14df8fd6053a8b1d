"""The listener: accepts connections, up to a limit, and stops gracefully; each is a `Connection`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import attrs
import trio
from starlette.types import ASGIApp

from runtime.server.connections.connection import Connection

logger = logging.getLogger("outrider")


@attrs.frozen
class ConnectionLimits:
    """Limits and timeouts of connections.

    Attributes:
        max_connections: open connections at a time, >= 1; further clients wait to be accepted.
        stalled_s: seconds that a client may leave 64 KiB of an answer unread.
        idle_s: seconds that a client may take for the head of its next request.
        grace_s: seconds that answers may take to end once the server stops.
    """

    max_connections: int = 1000
    stalled_s: float = 60.0
    idle_s: float = 30.0
    grace_s: float = 5.0


async def serve(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    until: Callable[[], Awaitable[object]],
    limits: ConnectionLimits,
) -> None:
    """Serve an ASGI application over HTTP/1.1 and HTTP/1.0.

    Args:
        app: the application.
        listeners: listening sockets; closed in the end.
        until: returns when the server is to stop: then no connection is accepted any more, and answers may end.
        limits: of each connection.

    Cancellation: closes all connections.
    """
    stopping = trio.Event()
    free_connections = trio.Semaphore(limits.max_connections)
    connections: set[Connection] = set()

    async def handle(stream: trio.SocketStream) -> None:
        connection = Connection(app, stream, stopping, stalled_s=limits.stalled_s, idle_s=limits.idle_s)
        connections.add(connection)
        # A failure of one connection must not affect the others.
        try:
            await connection.run()
        except Exception:
            logger.exception("a connection has failed")
        finally:
            connections.discard(connection)
            free_connections.release()

    limited = [_LimitedListener(listener, free_connections) for listener in listeners]
    async with trio.open_nursery() as handlers:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, handle, limited, handler_nursery=handlers))
            await until()
            accepting.cancel_scope.cancel()
        stopping.set()
        for connection in list(connections):
            connection.retire()
        handlers.cancel_scope.deadline = trio.current_time() + limits.grace_s


class _LimitedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that accepts a connection when one is free; whoever handles the connection frees it again."""

    def __init__(self, listener: trio.SocketListener, free_connections: trio.Semaphore) -> None:
        # trio.serve_listeners looks at the socket when `accept` fails.
        self.socket = listener.socket
        self._listener = listener
        self._free_connections = free_connections

    async def accept(self) -> trio.SocketStream:
        await self._free_connections.acquire()
        try:
            return await self._listener.accept()
        except BaseException:
            self._free_connections.release()
            raise

    async def aclose(self) -> None:
        await self._listener.aclose()
