"""A trio thread for callers in one asyncio loop, and what it takes from that loop."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, ClassVar, Generic, TypeVar, cast

import outcome
import trio

from protocol.errors import RuntimeClosedError, WrongEventLoopError
from runtime.aio import asyncio_loop
from runtime.bridge.portal import Future, TrioThread
from runtime.engine.runtime import Runtime
from runtime.generation.many_prompts import feed

T = TypeVar("T")


class AioThread(TrioThread):
    """A trio thread that is made, started and stopped by one asyncio loop, `loop`.

    It ends by itself once the loop is closed, or the loop's thread or the main thread has ended.
    """

    face = "aio"
    consumer = "task"
    how_to_close = "aclose()"
    may_await = True
    interruption = asyncio.CancelledError

    def __init__(self, open_runtime: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        """As `TrioThread`. Raises: as `asyncio_loop`."""
        self.loop = asyncio_loop()
        self._owner = threading.current_thread()
        super().__init__(open_runtime)

    def make_future(self) -> Future[Any]:
        return self.loop.create_future()

    async def wait(self, future: Future[T]) -> T:
        return future.result() if future.done() else await asyncio.shield(cast("asyncio.Future[T]", future))

    async def pause(self) -> None:
        await asyncio.sleep(0)

    def check_caller(self) -> None:
        if asyncio_loop() is not self.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )

    async def call_function(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    def iterated(self, items: Any) -> AsyncIterator[Any]:
        return LoopTask(self.loop, aiter(items), contextvars.copy_context()).items()

    def _deliver(self, future: Future[Any], value: object) -> bool:
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


class LoopTask(Generic[T]):
    """A task of an asyncio loop that advances an async iterator, one item for each request of trio's thread, and closes
    it at its end. It begins with the first request.
    """

    _running: ClassVar[set[asyncio.Task[bool]]] = set()  # a loop refers to its tasks only weakly

    _trio_token: trio.lowlevel.TrioToken
    _task: asyncio.Task[bool] | None = None
    _is_waiting = False  # for a request
    _is_closed = False

    def __init__(self, loop: asyncio.AbstractEventLoop, items: AsyncIterator[T], context: contextvars.Context) -> None:
        self._loop, self._items, self._context = loop, items, context
        # Items, and then the iterator's error, or None for its end.
        self._arrive, self._arrived = trio.open_memory_channel[outcome.Outcome[T] | None](math.inf)
        self._requested = asyncio.Event()

    # --- in trio's thread -------------------------------------------------------------------------

    async def items(self) -> AsyncGenerator[T, None]:
        """The items. Closing this generator, or cancelling it, closes the iterator.

        Raises: as the iterator; RuntimeClosedError: the loop is closed, or has cancelled the task.
        """
        self._trio_token = trio.lowlevel.current_trio_token()
        try:
            while True:
                try:
                    self._loop.call_soon_threadsafe(self._begin_or_go_on)
                except RuntimeError:
                    raise RuntimeClosedError("the asyncio loop of the prompts is closed") from None
                if (arrived := await self._arrived.receive()) is None:
                    return
                yield arrived.unwrap()
        finally:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._close)

    # --- in the loop ------------------------------------------------------------------------------

    def _begin_or_go_on(self) -> None:
        self._requested.set()
        if self._task is None:
            taking = feed(self._items, self._next_request, self._give, asyncio.CancelledError)
            self._task = self._loop.create_task(taking, context=self._context)
            self._running.add(self._task)
            self._task.add_done_callback(self._end)

    async def _next_request(self) -> bool:
        self._is_waiting = True
        try:
            await self._requested.wait()
        finally:
            self._is_waiting = False
        self._requested.clear()
        return not self._is_closed

    def _give(self, item: T) -> None:
        self._send(outcome.Value(item))

    def _send(self, arrived: outcome.Outcome[T] | None) -> None:
        with suppress(trio.RunFinishedError):
            self._trio_token.run_sync_soon(self._arrive.send_nowait, arrived)

    def _close(self) -> None:
        self._is_closed = True
        self._requested.set()
        # A generator at its `yield` is closed without a cancellation, and can await what it needs to end.
        if self._task is not None and not self._is_waiting:
            self._task.cancel()

    def _end(self, task: asyncio.Task[bool]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if self._is_closed and error is not None:
            what = "an async iterable of prompts raised an error while it was closed"
            self._loop.call_exception_handler({"message": what, "exception": error, "task": task})
        if error is None and not task.cancelled():
            self._send(None)
            return
        cancelled = RuntimeClosedError("the asyncio loop has cancelled the iteration over the prompts")
        self._send(outcome.Error(error if isinstance(error, Exception) else cancelled))
