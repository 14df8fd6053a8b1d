"""A trio thread for callers in one asyncio loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, TypeVar, cast

from runtime.aio import asyncio_loop
from runtime.bridge.trio_thread import BridgeFuture, TrioThread

if TYPE_CHECKING:
    from runtime.engine.runtime import Runtime

T = TypeVar("T")


class AioThread(TrioThread):
    """A trio thread that is made, started and stopped by one asyncio loop, `loop`.

    It ends by itself once the loop is closed, or the loop's thread or the main thread has ended.
    """

    def __init__(self, make_manager: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        """As `TrioThread`. Raises: as `asyncio_loop`."""
        self.loop = asyncio_loop()
        self._owner = threading.current_thread()
        super().__init__(make_manager)

    async def start(self) -> Runtime:
        """Start, and wait until the context manager has been entered. Raises: what entering it raises.

        Cancellation: stops the thread, and is raised once it has ended.
        """
        self._thread.start()
        try:
            await wait_result(self._started)
        except asyncio.CancelledError:
            await self._stop_and_wait()
            raise
        except GeneratorExit:
            self.stop()
            raise
        if self._ended.done():
            self._thread.join()
            self._raise_failure()
        return self._value

    async def stop_and_join(self) -> None:
        """Leave the context manager, and wait for the thread's end; harmless if it has. Raises: what leaving raises.

        Cancellation: the thread is joined in any case; the cancellation is raised after that.
        """
        await self._stop_and_wait()
        self._raise_failure()

    def make_future(self) -> BridgeFuture[Any]:
        return self.loop.create_future()

    async def _stop_and_wait(self) -> None:
        self.stop()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await wait_result(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
        # Does not block: the thread only has to return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

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


async def wait_result(future: BridgeFuture[T]) -> T:
    """The result of a future of an `AioThread`, for which other tasks may be waiting, too.

    Cancellation: leaves the future as it is.
    """
    return future.result() if future.done() else await asyncio.shield(cast("asyncio.Future[T]", future))
