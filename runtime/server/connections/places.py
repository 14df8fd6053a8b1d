"""Places for connections: how many there may be, and which one makes room for a new client."""

from __future__ import annotations

import trio

from runtime.server.connections.connection import Connection


class Places:
    """A limited number of connections. While a client waits for a place, idle connections are closed.

    Otherwise whoever opens connections and asks nothing would keep everybody else out. The one that has been idle for
    the longest goes first. Connections whose request is being answered stay.
    """

    def __init__(self, number: int) -> None:
        """All free.

        Args:
            number: of places, >= 1.
        """
        self._free = trio.Semaphore(number)
        self._num_waiting = 0
        self._keeps_idle = True
        self._connections: dict[Connection, None] = {}  # in the order in which they became idle, if they are idle

    async def take(self) -> None:
        """Wait for a free place and take it, for a connection that is about to be added.

        Cancellation: none is taken.
        """
        if self._free.value == 0:
            self.close_idle()
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1

    def close_idle(self) -> None:
        """Close the connection that has been idle for the longest, if there is one."""
        for connection in self._connections:
            if connection.is_idle:
                connection.retire()
                return

    def add(self, connection: Connection) -> None:
        """Add a connection, which has a place."""
        self._connections[connection] = None

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended, and free its place."""
        del self._connections[connection]
        self._free.release()

    def note_idle(self, connection: Connection) -> None:
        """To be called when a connection becomes idle."""
        del self._connections[connection]
        self._connections[connection] = None
        if not self._keeps_idle:
            connection.retire()
        elif self._num_waiting and self._free.value == 0:
            self.close_idle()

    def retire_all(self) -> None:
        """Close all idle connections, and from now on each that becomes idle or is added."""
        self._keeps_idle = False
        for connection in self._connections:
            connection.retire()
