"""The command line as a child process: its environment, and pseudo-terminals."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
from collections.abc import AsyncIterator
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


async def read_all(stream: Any) -> str:
    """All that comes until the end. A terminal that no process holds any more reports the end as an error."""
    parts = bytearray()
    with contextlib.suppress(trio.BrokenResourceError):
        async for part in stream:
            parts += part
    return parts.decode()


def broken_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\0" * 100)


async def piped(*arguments: str, lines: str) -> tuple[int | None, str, str]:
    """Run `chat` with lines on its standard input. Returns its exit status, standard output and standard error."""
    async with outrider("chat", *arguments, stdin=-1, stdout=-1, stderr=-1) as process:
        await process.stdin.send_all(lines.encode())
        await process.stdin.aclose()
        out, err = await read_all(process.stdout), await read_all(process.stderr)
    return process.returncode, out, err


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
