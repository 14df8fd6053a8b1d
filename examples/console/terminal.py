"""The terminal: put into raw mode with the alternate screen, and restored whatever happens."""

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

# Seconds that writing waits for a terminal that accepts nothing (after Ctrl-S).
PATIENCE_S = 1.0


class NoTerminalError(Exception):
    """Stdin or stdout is not a terminal, or the terminal cannot be opened."""


class Terminal:
    """A terminal that trio reads and writes without blocking."""

    def __init__(self, stdin: int, stdout: int) -> None:
        """Open the terminal behind two file descriptors, which stay unchanged.

        Raises: NoTerminalError: one of them is not a terminal.
        """
        for name, fd in (("stdin", stdin), ("stdout", stdout)):
            if not os.isatty(fd):
                raise NoTerminalError(f"{name} is no terminal, and this program is nothing without one")
        # Opened again, since the shell shares the blocking mode of the descriptors that it passed.
        self._input = _opened(stdin)
        self._output = _opened(stdout)
        self._before: list[object] | None = None

    async def aclose(self) -> None:
        """Close the terminal; the screen stays as it is."""
        await self._input.aclose()
        await self._output.aclose()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the terminal for the block, and restore it at the end."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """Take the screen and the keys. May be called again after another program has changed the terminal."""
        fd = self._input.fileno()
        if self._before is None:
            self._before = termios.tcgetattr(fd)
            self._write_now(ENTER)
        tty.setraw(fd, termios.TCSANOW)
        self._write_now(SET_UP)

    def give_back(self) -> None:
        """Restore the terminal; does nothing if it was not taken."""
        if self._before is None:
            return
        self._write_now(LEAVE)
        try:
            # Unread input was meant for this program, not for the shell.
            termios.tcflush(self._input.fileno(), termios.TCIFLUSH)
            termios.tcsetattr(self._input.fileno(), termios.TCSANOW, self._before)
        except termios.error:
            pass  # the terminal has gone
        self._before = None

    def suspend(self) -> None:
        """Stop the process group, as Ctrl-Z does; returns when it continues."""
        self.give_back()
        os.kill(0, signal.SIGTSTP)
        self.take()

    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self._output.fileno())
        except OSError:
            columns = rows = 0  # the terminal has gone
        return columns or 80, rows or 24

    async def read(self) -> bytes:
        """The bytes that were typed; empty if the terminal has gone.

        Cancellation: no input is lost.
        """
        try:
            return bytes(await self._input.receive_some())
        except trio.BrokenResourceError:
            return b""

    async def write(self, text: str) -> None:
        """Write to the terminal, once it accepts output.

        Cancellation: the output may be cut anywhere; `give_back` copes with that.
        """
        try:
            await self._output.send_all(text.encode("utf-8", "replace"))
        except trio.BrokenResourceError:
            await trio.sleep_forever()  # the terminal has gone, and the reading task notices

    def _write_now(self, text: str) -> None:
        data, fd = text.encode(), self._output.fileno()
        while data and select.select([], [fd], [], PATIENCE_S)[1]:
            try:
                data = data[os.write(fd, data) :]
            except BlockingIOError:
                continue
            except OSError:
                return  # the terminal has gone


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
    """Hold back all output to stderr, and write it after the block."""
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
