"""The cost of compiling a grammar, measured in a process that can be killed: `checker_process.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal

import attrs
import trio

from protocol.errors import OutriderError
from runtime.engine.nursery import BackgroundNursery

_PROGRAM = Path(__file__).with_name("checker_process.py")

Outcome = Literal["done", "time", "memory", "crash"]
"""How a compilation has ended: well, at the limit of CPU time or memory, or in a crash."""


class CheckerGoneError(OutriderError):
    """The process that checks grammars has ended; the next check starts another."""


GrammarCheck = Callable[[str], Awaitable[Outcome]]
"""Compiles a grammar, in llguidance's own format, and says how that has ended.

Raises: OutriderError: that cannot be found out. Cancellation: ends the compilation at once.
"""


@attrs.define
class _Job:
    """A grammar that is being checked; `over` is set once `outcome` or `error` is."""

    over: trio.Event = attrs.field(factory=trio.Event)
    outcome: Outcome | None = None
    error: OutriderError | None = None


@attrs.define
class GrammarChecker:
    """A process that checks grammars; the first check starts it, and a check after it has ended starts it again."""

    _nursery: trio.Nursery
    _read_vocabulary: Callable[[], tuple[str, list[int]]]
    _limits: dict[str, int]
    _ids: Iterator[int] = attrs.field(factory=count)
    _jobs: dict[int, _Job] = attrs.field(factory=dict)
    _outbox: trio.MemorySendChannel[dict[str, Any]] | None = None  # to the process; None if none runs

    async def __call__(self, grammar: str, /) -> Outcome:
        """See `GrammarCheck`.

        Raises:
            SettingsError: llguidance is not installed, or cannot read the tokenizer.
            CheckerGoneError: the process has ended.
        """
        if self._outbox is None:
            self._outbox, inbox = trio.open_memory_channel[dict[str, Any]](float("inf"))
            self._nursery.start_soon(self._run, inbox)
        # The outbox of the process that gets this job: by the end of the job, another process may have replaced it.
        id, job, outbox = next(self._ids), _Job(), self._outbox
        self._jobs[id] = job
        # Another task sends it: a cancellation of this task could leave half of a message in the pipe.
        outbox.send_nowait({"check": id, "grammar": grammar})
        try:
            await job.over.wait()
        finally:
            if self._jobs.pop(id, None) is not None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    outbox.send_nowait({"kill": id})
        if job.error is not None:
            raise job.error
        assert job.outcome is not None
        return job.outcome

    async def _run(self, inbox: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        error: OutriderError = CheckerGoneError("the process that checks grammars has ended; try again")
        try:
            tokenizer, end_tokens = await trio.to_thread.run_sync(self._read_vocabulary)
            await self._communicate({"tokenizer": tokenizer, "end_tokens": end_tokens, **self._limits}, inbox)
        except OutriderError as caught:
            error = caught
        except OSError as caught:
            error = CheckerGoneError(f"the process that checks grammars cannot be started: {caught}; try again")
        finally:
            self._outbox = None
            inbox.close()
            jobs, self._jobs = self._jobs, {}
            for job in jobs.values():
                job.error = error
                job.over.set()

    async def _communicate(self, first: dict[str, Any], inbox: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        process = await trio.lowlevel.open_process(
            # -P: otherwise Python would search the program's directory for modules first.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal must interrupt the server only.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with process.stdin, process.stdout, BackgroundNursery() as nursery:
                nursery.start_soon(_send, process.stdin, first, inbox)
                await self._receive(process.stdout)
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _receive(self, stdout: trio.abc.ReceiveStream) -> None:
        unread = b""
        with suppress(trio.BrokenResourceError):
            while data := await stdout.receive_some():
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    # None if the job was cancelled.
                    if (job := self._jobs.pop(answer["id"], None)) is not None:
                        job.outcome = answer["outcome"]
                        job.over.set()


async def _send(
    stdin: trio.abc.SendStream, first: dict[str, Any], inbox: trio.MemoryReceiveChannel[dict[str, Any]]
) -> None:
    # The receiving task notices that the process has ended.
    with suppress(trio.BrokenResourceError):
        await stdin.send_all(json.dumps(first).encode() + b"\n")
        async for request in inbox:
            await stdin.send_all(json.dumps(request).encode() + b"\n")


@asynccontextmanager
async def grammar_checker(
    read_vocabulary: Callable[[], tuple[str, list[int]]], *, cpu_s: int = 1, memory_bytes: int = 2**28
) -> AsyncIterator[GrammarChecker]:
    """A checker of grammars; its process ends with the block.

    Args:
        read_vocabulary: called in a thread; returns a fast tokenizer as JSON, and the ids of its end-of-text tokens. An
            OutriderError that it raises is the error of every check.
        cpu_s, memory_bytes: limits for each grammar; seconds are whole, >= 1.

    Cancellation: kills the process.
    """
    async with BackgroundNursery() as nursery:
        yield GrammarChecker(nursery, read_vocabulary, {"cpu_s": cpu_s, "memory_bytes": memory_bytes})
