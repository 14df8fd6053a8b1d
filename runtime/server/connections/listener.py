"""The listener: accepts connections, within a limit of their number and their time; each is a `Connection`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import attrs
import trio
from hypercorn.trio.worker_context import WorkerContext

from runtime.server.connections.connection import Connection

logger = logging.getLogger("outrider")


@attrs.frozen
class ConnectionLimits:
    """How much is borne with.

    Attributes:
        max_connections: at a time, >= 1; others wait to be accepted.
        stalled_s: seconds that a client may leave what it is sent unread.
        idle_s: seconds that a connection may be open without a request, or with one that is not whole but for its body.
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
    patience: ConnectionLimits,
) -> None:
    """Serve an ASGI application, by HTTP/1.1 and HTTP/1.0.

    Args:
        app: the application.
        listeners: that are listening; closed in the end.
        until: returns when no more connections are to be taken.
        patience: with clients.

    Cancellation: closes all connections.
    """
    context = WorkerContext(None)
    places = trio.Semaphore(patience.max_connections)
    connections: set[Connection] = set()

    async def converse(stream: trio.SocketStream) -> None:
        connection = Connection(app, stream, context, stalled_s=patience.stalled_s, idle_s=patience.idle_s)
        connections.add(connection)
        # Whatever one client can bring about, the others are not to know of it.
        try:
            await connection.run()
        except Exception:
            logger.exception("a connection has failed")
        finally:
            connections.discard(connection)
            places.release()

    doors = [_CountingListener(listener, places) for listener in listeners]
    async with trio.open_nursery() as conversations:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, converse, doors, handler_nursery=conversations))
            await until()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        for connection in list(connections):
            connection.retire()
        conversations.cancel_scope.deadline = trio.current_time() + patience.grace_s


class _CountingListener(trio.abc.Listener[trio.SocketStream]):
    """Lets somebody in when there is a place, which is the connection's to give back."""

    def __init__(self, listener: trio.SocketListener, places: trio.Semaphore) -> None:
        self.socket = listener.socket
        self._listener = listener
        self._places = places

    async def accept(self) -> trio.SocketStream:
        await self._places.acquire()
        try:
            return await self._listener.accept()
        except BaseException:
            self._places.release()
            raise

    async def aclose(self) -> None:
        await self._listener.aclose()
