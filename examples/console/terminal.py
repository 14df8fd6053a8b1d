"""The terminal: taken for the time that a program has the whole screen, and given back as it was, whatever happens."""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from console.screen import ENTER, LEAVE, SET_UP

# What is there to be said last waits so long for a terminal that takes nothing (Ctrl-S was pressed).
PATIENCE_S = 1.0


class NoTerminalError(Exception):
    """Stdin or stdout is no terminal."""


class Terminal:
    """A terminal that trio reads from and writes to without ever being blocked by it."""

    def __init__(self, stdin: int, stdout: int) -> None:
        """Of two file descriptors, which stay as they are.

        Raises: NoTerminalError: they are something else.
        """
        for name, fd in (("stdin", stdin), ("stdout", stdout)):
            if not os.isatty(fd):
                raise NoTerminalError(f"{name} is no terminal, and this program is nothing without one")
        # Opened anew: whether reading and writing block is a property that our shell would share with us otherwise.
        self._input = _opened(stdin)
        self._output = _opened(stdout)
        self._before: list[object] | None = None

    async def aclose(self) -> None:
        """Let go of it; what is shown stays."""
        await self._input.aclose()
        await self._output.aclose()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the whole screen, and every key, until the block is left."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Take the screen and the keys; also again, where others may have changed something meanwhile."""
        fd = self._input.fileno()
        if self._before is None:
            self._before = termios.tcgetattr(fd)
            self._write_now(ENTER)
        tty.setraw(fd, termios.TCSANOW)
        self._write_now(SET_UP)

    def give_back(self) -> None:
        """Leave everything as it was; harmless where it was not taken."""
        if self._before is None:
            return
        self._write_now(LEAVE)
        try:
            # What was typed and not read was meant for this program, and not for the shell.
            termios.tcflush(self._input.fileno(), termios.TCIFLUSH)
            termios.tcsetattr(self._input.fileno(), termios.TCSANOW, self._before)
        except termios.error:
            pass  # it is no longer there
        self._before = None

    def suspend(self) -> None:
        """Stop this process and those beside it in its job, as Ctrl-Z does; returns when they go on."""
        self.give_back()
        os.kill(0, signal.SIGTSTP)
        self.take()

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self._output.fileno())
        except OSError:
            columns = rows = 0  # it has gone
        return columns or 80, rows or 24

    async def read(self) -> bytes:
        """What was typed; empty where the terminal has gone.

        Cancellation: nothing is lost.
        """
        try:
            return bytes(await self._input.receive_some())
        except trio.BrokenResourceError:
            return b""

    async def write(self, text: str) -> None:
        """Show something, once the terminal takes it.

        Cancellation: it may be cut anywhere; what `give_back` writes does no harm then.
        """
        try:
            await self._output.send_all(text.encode("utf-8", "replace"))
        except trio.BrokenResourceError:
            await trio.sleep_forever()  # it has gone, and whoever reads will hear of it

    def _write_now(self, text: str) -> None:
        data, fd = text.encode(), self._output.fileno()
        while data and select.select([], [fd], [], PATIENCE_S)[1]:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except OSError:
                return  # it is no longer there


def _opened(fd: int) -> trio.lowlevel.FdStream:
    try:
        name = os.ttyname(fd)
    except OSError:
        name = os.ctermid()  # a terminal of another container has no name here
    try:
        return trio.lowlevel.FdStream(os.open(name, os.O_RDWR | os.O_NOCTTY))
    except OSError as error:
        raise NoTerminalError(f"cannot open the terminal {name}: {error.strerror}") from error


@contextmanager
def stderr_kept() -> Iterator[None]:
    """Keep what anything says on stderr off the screen, and say it after the block."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            if words := said.read():
                sys.stderr.write(words.decode(errors="replace"))
                sys.stderr.flush()
