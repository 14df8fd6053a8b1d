"""The listener: accepts connections, up to a limit, and stops gracefully; each is a `Connection`."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import trio
from starlette.types import ASGIApp

from runtime.server.connections.connection import Connection
from runtime.server.limits import DEFAULT_CONNECTIONS, Limits


class ConnectionSlots:
    """A limited number of connections; while a client waits for a place, the longest idle one is closed.

    Otherwise a client that opens connections and sends no requests would keep everybody else out.
    """

    def __init__(self, number: int) -> None:
        self._free = trio.Semaphore(number)
        self._keeps_idle = True
        self._connections: dict[Connection, None] = {}  # in the order in which they became idle, if they are idle
        self._retired: set[Connection] = set()  # those of them that were closed to make room

    async def take(self) -> None:
        """Wait for a free place and take it, for a connection that is then added. Cancellation: none is taken."""
        self._make_room(1 + self._num_waiting)
        await self._free.acquire()

    def close_idle(self) -> None:
        """Close the connection that has been idle for the longest, if there is one."""
        for connection in self._connections:
            if connection.is_idle and connection not in self._retired:
                self._retired.add(connection)
                connection.retire()
                return

    @property
    def _num_waiting(self) -> int:
        return self._free.statistics().tasks_waiting

    def _make_room(self, num_waiting: int) -> None:
        """Close an idle connection, unless there is a place, or will be, for everybody who waits."""
        if num_waiting > self._free.value + len(self._retired):
            self.close_idle()

    def add(self, connection: Connection) -> None:
        """Add a connection that has taken a place."""
        self._connections[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended, and free its place."""
        del self._connections[connection]
        self._retired.discard(connection)
        self._free.release()

    def note_idle(self, connection: Connection) -> None:
        """To be called when a connection becomes idle."""
        del self._connections[connection]
        self._connections[connection] = None
        self._retired.discard(connection)  # a request had come already
        if not self._keeps_idle:
            connection.retire()
        else:
            self._make_room(self._num_waiting)

    def retire_all(self) -> None:
        """Close all idle connections, and from now on each that becomes idle or is added."""
        self._keeps_idle = False
        for connection in self._connections:
            connection.retire()


logger = logging.getLogger("outrider")

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
    """Serve an ASGI application over HTTP/1.1 and HTTP/1.0.

    Once the server is to stop, it drains: connections are still accepted, so that a load balancer hears from the
    application that the server stops, but each response is the last of its connection. After that, no connection is
    accepted, idle ones are closed, and the others end with their response. `limits.grace_s` bounds all of it.

    Args:
        listeners: listening sockets; closed in the end.
        until: returns when the server is to stop.
        drain: called then; returns when no connection need be accepted any more.

    Cancellation: closes all connections.
    """
    stopping = trio.Event()
    slots = ConnectionSlots(limits.max_connections or DEFAULT_CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        connection = Connection(
            app, stream, stopping, stalled_s=limits.stalled_s, idle_s=limits.idle_s, when_idle=slots.note_idle
        )
        slots.add(connection)
        # A failure of one connection must not affect the others.
        try:
            await connection.run()
        except Exception:
            logger.exception("a connection has failed")
        finally:
            slots.remove(connection)

    limited = [_LimitedListener(listener, slots) for listener in listeners]
    async with trio.open_nursery() as handlers:
        async with trio.open_nursery() as accepting:
            accepting.start_soon(partial(trio.serve_listeners, handle, limited, handler_nursery=handlers))
            await until()
            stopping.set()
            handlers.cancel_scope.deadline = trio.current_time() + limits.grace_s
            await drain()
            accepting.cancel_scope.cancel()
        slots.retire_all()


class _LimitedListener(trio.abc.Listener[trio.SocketStream]):
    """A listener that takes a slot for each connection; the connection's handler frees it."""

    def __init__(self, listener: trio.SocketListener, slots: ConnectionSlots) -> None:
        # trio.serve_listeners looks at the socket when `accept` fails.
        self.socket = listener.socket
        self._listener = listener
        self._slots = slots
        self._next_warning_s = 0.0  # on trio's clock

    async def accept(self) -> trio.SocketStream:
        # Accepted before it has a place: only then is it known that a client waits for one.
        stream = await self._accept()
        try:
            await self._slots.take()
        except BaseException:
            stream.socket.close()
            raise
        return stream

    async def _accept(self) -> trio.SocketStream:
        while True:
            try:
                return await self._listener.accept()
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                if (now := trio.current_time()) >= self._next_warning_s:
                    self._next_warning_s = now + _WARNING_INTERVAL_S
                    logger.warning(
                        "new connections cannot be accepted: %s; idle ones are closed meanwhile", error.strerror
                    )
                self._slots.close_idle()
                await trio.sleep(_RETRY_S)

    async def aclose(self) -> None:
        await self._listener.aclose()
