"""The command line as a child process: its environment, and pseudo-terminals."""

import contextlib
import io
import json
import os
import pty
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import trio
from models import llama, save

from runtime.cli import main as cli

ROOT = Path(__file__).parents[2]


# Ends a hang; not an expectation.
HANGS_S = 120


def save_model(where: Path, *, context: int) -> Path:
    """Save a tiny model with a context of `context` tokens; see `models.save`."""
    return Path(save(where, llama(max_position_embeddings=context)))


def environment() -> dict[str, str]:
    """An environment in which a process's output does not depend on who runs the tests."""
    without = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "TRANSFORMERS_VERBOSITY", "LINES"}
    ours = {name: value for name, value in os.environ.items() if name not in without}
    return ours | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "PYTHONUTF8": "1"}


@contextlib.asynccontextmanager
async def outrider(*arguments: str, **streams: Any) -> AsyncIterator[trio.Process]:
    """`python -m runtime …` as a process. It is killed on exit if it still runs."""
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "runtime", *arguments], env=environment(), **{"stdin": -3, **streams}
    )
    try:
        with trio.fail_after(HANGS_S):
            yield process
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                await stream.aclose()


@contextlib.asynccontextmanager
async def terminal() -> AsyncIterator[tuple[trio.lowlevel.FdStream, int]]:
    """A pseudo-terminal: the stream of its master side, and the file descriptor of its slave side."""
    seen, given = pty.openpty()
    try:
        async with trio.lowlevel.FdStream(seen) as stream:
            yield stream, given
    finally:
        with contextlib.suppress(OSError):
            os.close(given)


class Screen:
    """What is written to a pseudo-terminal, read on a thread: a command that fills it would wait for ever."""

    def __init__(self, fd: int) -> None:
        self._fd, self._written, self._came = fd, b"", threading.Condition()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    @property
    def text(self) -> str:
        """What came so far."""
        return self._written.decode()

    def wait_for(self, wanted: str) -> None:
        """Wait for a text, on another thread than that of the command."""
        with self._came:
            assert self._came.wait_for(lambda: wanted.encode() in self._written, HANGS_S), self._written

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # of a terminal that nobody holds any more
            while piece := os.read(self._fd, 65536):
                with self._came:
                    self._written += piece
                    self._came.notify_all()


@contextlib.contextmanager
def at_a_terminal(monkeypatch: Any, name: str) -> Iterator[Screen]:
    """Have stdout or stderr of this process be a terminal, in the environment of `environment()`."""
    seen, given = pty.openpty()
    screen = Screen(seen)
    with open(given, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        for variable in os.environ.keys() - environment().keys():
            patch.delenv(variable)
        for variable in ("TERM", "COLUMNS"):
            patch.setenv(variable, environment()[variable])
        patch.setattr(sys, name, stream)
        yield screen
    screen.thread.join()
    os.close(seen)


async def read_all(stream: Any) -> str:
    """All that comes until the end. A terminal that no process holds any more reports the end as an error."""
    parts = bytearray()
    with contextlib.suppress(trio.BrokenResourceError):
        async for part in stream:
            parts += part
    return parts.decode()


def broken_weights(model: Path) -> None:
    """Leave a model without weights, which shows only when it is loaded."""
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")


def piped(capture: Any, monkeypatch: Any, *arguments: str, lines: str) -> tuple[int, str, str]:
    """Run `chat` here, with lines on its standard input. Returns its exit status, and its output and errors."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    status = cli.main(["chat", *arguments])
    return status, *capture.readouterr()


def ran(capture: Any, *arguments: str, status: int = 0) -> Any:
    """What a command prints here, as (out, err); asserts its status, also where argparse ends it."""
    try:
        found: Any = cli.main(list(arguments))
    except SystemExit as left:
        found = left.code
    assert found == status
    return capture.readouterr()


def json_of(capture: Any, *arguments: str, status: int = 0) -> Any:
    """The JSON that a command prints."""
    return json.loads(ran(capture, *arguments, status=status).out)


def refusal(capture: Any, *arguments: str, status: int = 2) -> str:
    """The line with which a command fails that prints nothing else."""
    out, err = ran(capture, *arguments, status=status)
    assert out == ""
    assert err.startswith("outrider: error: ")
    assert err.count("\n") == 1
    return str(err)
