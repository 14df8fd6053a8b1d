"""A trio thread for callers in one asyncio loop, and what it takes from that loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

import outcome
import trio

from protocol.errors import RuntimeClosedError
from runtime.aio import asyncio_loop
from runtime.bridge.trio_thread import BridgeFuture, TrioThread

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

T = TypeVar("T")


class AioThread(TrioThread):
    """A trio thread that is made, started and stopped by one asyncio loop, `loop`.

    It ends by itself once the loop is closed, or the loop's thread or the main thread has ended.
    """

    interruption = asyncio.CancelledError

    def __init__(self, make_manager: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        """As `TrioThread`. Raises: as `asyncio_loop`."""
        self.loop = asyncio_loop()
        self._owner = threading.current_thread()
        super().__init__(make_manager)

    def make_future(self) -> BridgeFuture[Any]:
        return self.loop.create_future()

    async def wait(self, future: BridgeFuture[T]) -> T:
        return future.result() if future.done() else await asyncio.shield(cast("asyncio.Future[T]", future))

    def _deliver(self, future: BridgeFuture[Any], value: object) -> bool:
        def set_result() -> None:
            if not future.done():
                future.set_result(value)

        try:
            self.loop.call_soon_threadsafe(set_result)
        except RuntimeError:
            return False  # the loop is closed
        return True

    def _has_callers(self) -> bool:
        # The main thread too: the interpreter's exit joins this thread, and leaves the loop of a daemon thread open.
        owners = self._owner, threading.main_thread()
        return not self.loop.is_closed() and all(owner.is_alive() for owner in owners)


class LoopIterator(Generic[T]):
    """An async iterator of an asyncio loop, for tasks in the trio thread; each item is awaited in the loop, in a task
    with the context of the code that has made this object.

    Cancellation: cancels the task.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, items: AsyncIterator[T]) -> None:
        self._loop, self._items = loop, items
        self._context = contextvars.copy_context()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        """Raises: as the iterator; RuntimeClosedError: the loop is closed, or has cancelled the task."""
        arrived, has_arrived = [], trio.Event()
        trio_token = trio.lowlevel.current_trio_token()
        tasks: list[asyncio.Task[None]] = []

        def arrive(result: outcome.Outcome[T]) -> None:
            arrived.append(result)
            has_arrived.set()

        async def take() -> None:
            result: outcome.Outcome[T]
            try:
                result = outcome.Value(await anext(self._items))
            except (Exception, asyncio.CancelledError) as error:
                is_cancelled = isinstance(error, asyncio.CancelledError)
                closed = RuntimeClosedError("the asyncio loop has cancelled the iteration over the prompts")
                result = outcome.Error(closed if is_cancelled else error)
            with suppress(trio.RunFinishedError):
                trio_token.run_sync_soon(arrive, result)

        def begin() -> None:
            tasks.append(self._loop.create_task(take(), context=self._context))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            raise RuntimeClosedError("the asyncio loop of the prompts is closed") from None
        try:
            await has_arrived.wait()
        except trio.Cancelled:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(cancel)
            raise
        return arrived[0].unwrap()
