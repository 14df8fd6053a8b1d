"""The faces of the runtime: in trio, on asyncio and uvloop, and in plain threads; for tests of what they do alike."""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import outcome
import pytest
import trio
import uvloop
from our_threads import outrider_threads
from polling import until_in_asyncio, until_in_trio
from sweeps import sweep

import runtime

Test = Callable[..., Coroutine[Any, Any, Any]]


class TrioFace:
    """Trio. Tests wait with `until`, and have other tasks or threads run with `start` and `result`."""

    open = staticmethod(runtime.open)

    def run(self, test: Test) -> None:
        async def main() -> None:
            async with trio.open_nursery() as self._nursery:
                await test()

        trio.run(main)

    async def until(self, holds: Callable[[], bool]) -> None:
        await until_in_trio(holds)

    def start(self, function: Test) -> Any:
        outcomes: list[outcome.Outcome[Any]] = []

        async def run() -> None:
            outcomes.append(await outcome.acapture(function))

        self._nursery.start_soon(run)
        return outcomes

    async def result(self, task: Any) -> Any:
        await self.until(lambda: bool(task))
        return task[0].unwrap()


class AsyncioFace:
    """Asyncio, or uvloop."""

    open = staticmethod(runtime.aio.open)

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop_factory = loop_factory

    def run(self, test: Test) -> None:
        with asyncio.Runner(loop_factory=self._loop_factory) as runner:
            runner.run(test())

    async def until(self, holds: Callable[[], bool]) -> None:
        await until_in_asyncio(holds)

    def start(self, function: Test) -> Any:
        return asyncio.ensure_future(function())

    async def result(self, task: Any) -> Any:
        return await task


class ThreadsFace:
    """Plain threads: coroutines of tests never wait, so each runs to its end at once."""

    open = staticmethod(runtime.open_sync)

    def run(self, test: Test) -> Any:
        try:
            test().send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a coroutine has waited in a plain thread")

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            pass

    def start(self, function: Test) -> Future[Any]:
        pool = ThreadPoolExecutor(1)
        task = pool.submit(self.run, function)
        pool.shutdown(wait=False)
        return task

    async def result(self, task: Future[Any]) -> Any:
        return task.result()


Face = TrioFace | AsyncioFace | ThreadsFace
FACES: dict[str, Callable[[], Face]] = {
    "trio": TrioFace,
    "asyncio": lambda: AsyncioFace(asyncio.new_event_loop),
    "threads": ThreadsFace,
    "uvloop": lambda: AsyncioFace(uvloop.new_event_loop),
}


def on_every_face(test: Test, *, uvloop: bool = False) -> Callable[..., Any]:
    """Run an async test of `open`, or of `face`, with each face, and check that no thread is left.

    It uses what waits, and is a coroutine only in an event loop, by the functions below.

    Args:
        uvloop: run it on uvloop as well, which takes another way into other threads than asyncio's own loop.
    """
    return _on(["trio", "asyncio", "threads", *(["uvloop"] if uvloop else [])], test)


def on_asyncio(test: Test, *, uvloop: bool = False) -> Callable[..., Any]:
    """Likewise, but with asyncio alone; on uvloop, it is a slow test."""
    return _on(["asyncio", *([pytest.param("uvloop", marks=pytest.mark.slow)] if uvloop else [])], test)


def _on(faces: list[Any], test: Test) -> Callable[..., Any]:
    signature = inspect.signature(test)
    takes = [name for name in ("open", "face") if name in signature.parameters]

    def run(name: str, **given: Any) -> None:
        face = FACES[name]()
        ours = {"open": face.open, "face": face}
        face.run(functools.partial(test, **{each: ours[each] for each in takes}, **given))
        assert outrider_threads() == []

    functools.update_wrapper(run, test)
    names = ["name", *(name for name in signature.parameters if name not in takes)]
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return sweep("name", faces)(run)


async def got(result: Any) -> Any:
    """What a method returns that waits."""
    return await result if inspect.isawaitable(result) else result


async def next_of(stream: Any) -> Any:
    """The next item, which must come."""
    return await anext(stream) if hasattr(stream, "__anext__") else next(stream)


async def all_of(stream: Any) -> list[Any]:
    """The items that are left."""
    return [item async for item in stream] if hasattr(stream, "__anext__") else list(stream)


async def closed(thing: Any) -> None:
    """Close a stream or a runtime."""
    await got(thing.aclose() if hasattr(thing, "aclose") else thing.close())


@contextlib.asynccontextmanager
async def within(manager: Any) -> AsyncIterator[Any]:
    """A context manager's block."""
    if hasattr(manager, "__aenter__"):
        async with manager as value:
            yield value
    else:
        with manager as value:
            yield value
