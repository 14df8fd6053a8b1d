"""The cost of compiling a grammar, measured in a process that it may end: `checker_process.py`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import trio

from protocol.errors import OutriderError

_PROGRAM = Path(__file__).with_name("checker_process.py")

Outcome = Literal["done", "time", "memory", "crash"]
"""How a compilation has ended: well, at the limit of CPU time or memory, or in a crash."""

# By the status of the process: its own for too much memory, and Rust's where memory cannot be allocated.
_OUTCOMES: dict[int, Outcome] = {-signal.SIGPROF: "time", 3: "memory", -signal.SIGABRT: "memory"}


class CheckerGoneError(OutriderError):
    """The process that checks grammars has ended; the next check starts another."""

    def __init__(self, how: str = "has ended") -> None:
        super().__init__(f"the process that checks grammars {how}; try again")


GrammarCheck = Callable[[str], Awaitable[Outcome]]
"""Compiles a grammar, in llguidance's own format, and says how that has ended.

Raises: OutriderError: that cannot be found out, as where llguidance is not installed. Cancellation: ends the
compilation at once.
"""


async def _started() -> trio.Process:
    try:
        return await trio.lowlevel.open_process(
            # -P: otherwise Python would search the program's directory for modules first.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal must interrupt the server only.
            start_new_session=True,
        )
    except OSError as error:
        raise CheckerGoneError(f"cannot be started: {error}") from error


async def _answer(process: trio.Process, message: Any) -> bytes:
    """The line with which a process answers a message; b"" if it ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(trio.BrokenResourceError):
        await process.stdin.send_all(json.dumps(message).encode() + b"\n")
    return bytes(await process.stdout.receive_some())  # short enough to come at once


async def _end(process: trio.Process) -> None:
    process.kill()
    with trio.CancelScope(shield=True):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                await pipe.aclose()
        await process.wait()


@asynccontextmanager
async def grammar_checker(
    read_vocabulary: Callable[[], tuple[str, list[int]]], *, cpu_s: int = 1, memory_bytes: int = 2**28
) -> AsyncIterator[GrammarCheck]:
    """A checker of grammars, in processes that end with the block, for one grammar at a time each.

    A process that is done and within its limits waits for the next check. If it ends, the next check starts another.

    Args:
        read_vocabulary: called in a thread; returns a fast tokenizer as JSON, and the ids of its end-of-text tokens. An
            OutriderError that it raises is the error of every check.
        cpu_s, memory_bytes: limits for each grammar; seconds are whole, >= 1.
    """
    idle: trio.Process | None = None

    async def check(grammar: str) -> Outcome:
        nonlocal idle
        process, idle, first = idle, None, None
        if process is None:
            tokenizer, end_tokens = await trio.to_thread.run_sync(read_vocabulary)
            limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes}
            first = {"tokenizer": tokenizer, "end_tokens": end_tokens, **limits}
            process = await _started()
        try:
            if first is not None and not await _answer(process, first):
                raise CheckerGoneError
            answer = await _answer(process, grammar)
            if answer == b"done\n" and idle is None:
                idle = process
            if answer:
                return "done"
            if (status := await process.wait()) == -signal.SIGKILL:
                raise CheckerGoneError
            return _OUTCOMES.get(status, "crash")
        finally:
            if idle is not process:
                await _end(process)

    try:
        yield check
    finally:
        if idle is not None:
            await _end(idle)
