"""Tests of what a runtime does alike on asyncio, on uvloop and in plain threads; some also in trio."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
from our_threads import outrider_threads
from sweeps import sweep

import runtime

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_every_face(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """Run an async test of `open` with each face, and check that no thread is left.

    It uses what waits, and is a coroutine only in an event loop, by the functions below.
    """

    def run(face: str, **given: Any) -> None:
        if face in LOOPS:
            with asyncio.Runner(loop_factory=LOOPS[face]) as runner:
                runner.run(test(open=runtime.aio.open, **given))
        else:
            with pytest.raises(StopIteration):  # nothing waits
                test(open=runtime.open_sync, **given).send(None)
        assert outrider_threads() == []

    functools.update_wrapper(run, test)
    signature = inspect.signature(test)
    names = ["face", *(name for name in signature.parameters if name != "open")]
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return sweep("face", ["asyncio", "threads", pytest.param("uvloop", marks=pytest.mark.slow)])(run)


async def got(result: Any) -> Any:
    """What a method returns that waits."""
    return await result if inspect.isawaitable(result) else result


async def next_of(stream: Any) -> Any:
    """The next item, which must come."""
    return await anext(stream) if hasattr(stream, "__anext__") else next(stream)


async def all_of(stream: Any) -> list[Any]:
    """The items that are left."""
    return [item async for item in stream] if hasattr(stream, "__anext__") else list(stream)


@contextlib.asynccontextmanager
async def within(manager: Any) -> AsyncIterator[Any]:
    """A context manager's block."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value
