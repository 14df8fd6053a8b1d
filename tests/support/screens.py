"""A terminal with a person in front of it: a test types keys and reads the screen."""

import contextlib
import copy
import fcntl
import os
import pty
import struct
import termios
from collections.abc import AsyncIterator, Callable
from typing import Any

import pyte
import trio

ALTERNATE_SCREEN = 1049

# Ends a hang; not an expectation.
HANGS_S = 30


class TwoScreens(pyte.Screen):
    """pyte's screen with an alternate screen, which pyte lacks."""

    def __init__(self, columns: int, lines: int) -> None:
        self._other: Any = None
        super().__init__(columns, lines)

    def set_mode(self, *modes: int, **kwargs: Any) -> None:
        super().set_mode(*modes, **kwargs)
        if ALTERNATE_SCREEN in modes and self._other is None:
            self._other = copy.deepcopy(self.buffer), copy.copy(self.cursor)

    def reset_mode(self, *modes: int, **kwargs: Any) -> None:
        super().reset_mode(*modes, **kwargs)
        if ALTERNATE_SCREEN in modes and self._other is not None:
            (self.buffer, self.cursor), self._other = self._other, None


class Person:
    """A person at a terminal.

    Attributes:
        sent: all bytes that the program wrote.
        given: file descriptor of the program's side; this process holds it too, until `lets_go`.
    """

    def __init__(self, seen: trio.lowlevel.FdStream, given: int, columns: int, rows: int) -> None:
        self.given = given
        self.screen = TwoScreens(columns, rows)
        self.sent = bytearray()
        self._seen = seen
        self._bytes = pyte.ByteStream(self.screen)
        self._set_size(columns, rows)

    async def types(self, keys: str | bytes) -> None:
        await self._seen.send_all(keys.encode() if isinstance(keys, str) else keys)

    def lets_go(self) -> None:
        """Close this process's copy of the program's side, so that reading ends when the program ends."""
        if self.given >= 0:
            os.close(self.given)
            self.given = -1

    def resizes(self, columns: int, rows: int) -> None:
        """Change the size of the window, which clears it. The program has to be told by a signal."""
        self.screen.resize(rows, columns)
        self.screen.erase_in_display(2)
        self._set_size(columns, rows)

    async def sees(self, wanted: str | Callable[[str], Any]) -> str:
        """Read until a text is on the screen, or a predicate holds. Returns: the rows, without blanks at their ends."""
        is_there = (lambda shown: wanted in shown) if isinstance(wanted, str) else wanted
        # The cursor is hidden while a screen is redrawn, and what is read may end in the middle of that.
        while self.screen.cursor.hidden or not is_there(self.shown):
            try:
                with trio.fail_after(HANGS_S):
                    part = await self._seen.receive_some()
            except (trio.BrokenResourceError, trio.TooSlowError):
                part = b""
            assert part, f"{wanted!r} never came, but\n{self.shown}"
            self.sent += part
            self._bytes.feed(bytes(part))
        return self.shown

    async def sees_the_end(self) -> str:
        """Read until no process holds the terminal."""
        with contextlib.suppress(trio.BrokenResourceError):
            async for part in self._seen:
                self.sent += part
                self._bytes.feed(bytes(part))
        return self.shown

    @property
    def shown(self) -> str:
        return "\n".join(row.rstrip() for row in self.screen.display)

    @property
    def attributes(self) -> list[Any]:
        return termios.tcgetattr(self.given)

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.given, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextlib.asynccontextmanager
async def person(columns: int = 80, rows: int = 24) -> AsyncIterator[Person]:
    """A person at a terminal of that size."""
    seen, given = pty.openpty()
    async with trio.lowlevel.FdStream(seen) as stream:
        somebody = Person(stream, given, columns, rows)
        try:
            yield somebody
        finally:
            somebody.lets_go()
