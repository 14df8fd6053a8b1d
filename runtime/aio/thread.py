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
