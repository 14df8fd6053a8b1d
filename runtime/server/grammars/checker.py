"""Measures what a grammar costs to compile, in a process that can be killed: `checker_process.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
import trio

from protocol.errors import OutriderError
from runtime.engine.nursery import BackgroundNursery

_PROGRAM = Path(__file__).with_name("checker_process.py")

Outcome = Literal["done", "time", "memory", "crash"]


class CheckerGoneError(OutriderError):
    """The process that tries out grammars has ended; the next grammar starts another."""


@attrs.frozen
class Cost:
    """What it took to compile a grammar.

    Attributes:
        outcome: "done"; or what it took too much of; or that it brought the process down.
        cpu_s: seconds of CPU time until then.
    """

    outcome: Outcome
    cpu_s: float


class GrammarCheck(Protocol):
    """Tries out a grammar."""

    async def __call__(self, grammar: str, /) -> Cost:
        """What it takes to compile `grammar`, which is in llguidance's own format.

        Raises: OutriderError: that cannot be found out.

        Cancellation: ends it at once.
        """


@attrs.define
class _Job:
    """A grammar that is being tried out.

    Attributes:
        over: set once it is known what it costs, or that it will not be.
    """

    over: trio.Event = attrs.field(factory=trio.Event)
    cost: Cost | None = None
    error: OutriderError | None = None


class GrammarChecker:
    """A process that tries out grammars; it is started with the first one, and again where it has ended."""

    def __init__(
        self, nursery: trio.Nursery, read_vocabulary: Callable[[], tuple[str, list[int]]], cpu_s: int, memory_bytes: int
    ) -> None:
        self._nursery = nursery
        self._read_vocabulary = read_vocabulary
        self._bounds = {"cpu_s": cpu_s, "memory_bytes": memory_bytes}
        self._ids = count()
        self._jobs: dict[int, _Job] = {}
        self._outbox: trio.MemorySendChannel[dict[str, Any]] | None = None

    async def __call__(self, grammar: str, /) -> Cost:
        """See `GrammarCheck`.

        Raises:
            SettingsError: llguidance is not installed, or cannot read the tokenizer.
            CheckerGoneError: the process has ended.
        """
        if self._outbox is None:
            self._outbox, inbox = trio.open_memory_channel[dict[str, Any]](float("inf"))
            self._nursery.start_soon(self._run, inbox)
        # The process that is asked; by the end of this, there may be another.
        id, job, outbox = next(self._ids), _Job(), self._outbox
        self._jobs[id] = job
        # Sent by a task of its own: half of a message, where this one is cancelled, would be the end of all.
        outbox.send_nowait({"check": id, "grammar": grammar})
        try:
            await job.over.wait()
        finally:
            if self._jobs.pop(id, None) is not None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    outbox.send_nowait({"kill": id})
        if job.error is not None:
            raise job.error
        assert job.cost is not None
        return job.cost

    async def _run(self, inbox: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        """A process, from its start to its end."""
        error: OutriderError = CheckerGoneError("the process that tries out grammars has ended; try again")
        try:
            tokenizer, ends = await trio.to_thread.run_sync(self._read_vocabulary)
            await self._converse({"tokenizer": tokenizer, "end_tokens": ends, **self._bounds}, inbox)
        except OutriderError as caught:
            error = caught
        except OSError as caught:
            error = CheckerGoneError(f"the process that tries out grammars cannot be started: {caught}; try again")
        finally:
            self._outbox = None
            inbox.close()
            jobs, self._jobs = self._jobs, {}
            for job in jobs.values():
                job.error = error
                job.over.set()

    async def _converse(self, first: dict[str, Any], inbox: trio.MemoryReceiveChannel[dict[str, Any]]) -> None:
        process = await trio.lowlevel.open_process(
            # Not the directory of the program before all others, whose modules are not meant by their bare names.
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in a terminal is the server's to hear.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with process.stdin, process.stdout, trio.open_nursery() as nursery:
                nursery.start_soon(_send, process.stdin, first, inbox)
                await self._receive(process.stdout)
                nursery.cancel_scope.cancel()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def _receive(self, stdout: trio.abc.ReceiveStream) -> None:
        """Hear what grammars cost, until the process has ended."""
        unread = b""
        with suppress(trio.BrokenResourceError):
            while data := await stdout.receive_some():
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    answer = json.loads(line)
                    # None where nobody waits for it any more.
                    if (job := self._jobs.pop(answer["id"], None)) is not None:
                        job.cost = Cost(answer["outcome"], answer["cpu_s"])
                        job.over.set()


async def _send(
    stdin: trio.abc.SendStream, first: dict[str, Any], inbox: trio.MemoryReceiveChannel[dict[str, Any]]
) -> None:
    # That the process has ended is heard where it is listened to.
    with suppress(trio.BrokenResourceError):
        await stdin.send_all(json.dumps(first).encode() + b"\n")
        async for request in inbox:
            await stdin.send_all(json.dumps(request).encode() + b"\n")


@asynccontextmanager
async def grammar_checker(
    read_vocabulary: Callable[[], tuple[str, list[int]]], *, cpu_s: int = 1, memory_bytes: int = 2**28
) -> AsyncIterator[GrammarChecker]:
    """A checker of grammars, whose process ends with the block.

    Args:
        read_vocabulary: called in a thread; a fast tokenizer as JSON, and the ids of its end-of-text tokens. May raise
            an OutriderError, which is what is then said of every grammar.
        cpu_s: seconds of CPU time that a grammar may take, >= 1.
        memory_bytes: that it may take.

    Cancellation: kills the process.
    """
    async with BackgroundNursery() as nursery:
        yield GrammarChecker(nursery, read_vocabulary, cpu_s, memory_bytes)
