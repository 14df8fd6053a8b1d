"""Idle reading: what the next turns of chats will begin with is read while the models have nothing else to do."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

logger = logging.getLogger("outrider")

Read = Callable[[], Awaitable[object]]


class IdleReading:
    """The prompts that are expected, and the task that reads them; see `runtime.open` about `idle_reading`.

    It gives way to anything else: a stream that begins waits for the pass that runs, what was read by then is kept, and
    what was expected is forgotten, since the stream may be what it was expected for.
    """

    def __init__(self, is_idle: Callable[[], bool]) -> None:
        """`is_idle` says whether the models have nothing to do."""
        self._is_idle = is_idle
        self._expected: list[Read] = []
        self._scope = trio.CancelScope()
        self._wakeup = trio.Event()

    def expect(self, read: Read) -> None:
        """Call and await `read`, which reads a prompt and may be cancelled, once there is nothing else to do."""
        self._expected.append(read)
        self.look()

    def look(self) -> None:
        """Note that there may be nothing else to do."""
        if self._expected:
            self._wakeup.set()

    def give_way(self) -> None:
        """Note that there is something else to do. Never waits."""
        self._expected.clear()
        self._scope.cancel()

    async def run(self) -> None:
        """Read what is expected, until cancelled."""
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            while self._expected and self._is_idle():
                read = self._expected.pop()
                with trio.CancelScope() as self._scope:
                    try:
                        await read()
                    except Exception as error:  # of any kind: nobody has asked for it
                        logger.debug("nothing was read ahead: %s", error)
