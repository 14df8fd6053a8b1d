"""A trio loop in a thread of its own, beside an asyncio loop that wants something of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar, cast

import outcome
import trio

from protocol.errors import WrongEventLoopError
from runtime.bridge.call import BridgeCall
from runtime.bridge.trio_thread import Promise, TrioThread

T = TypeVar("T")


def asyncio_loop() -> asyncio.AbstractEventLoop:
    """The asyncio loop that this runs under.

    Raises: WrongEventLoopError: there is none, or trio is what runs.
    """
    # In this order: where trio is a guest of asyncio, both are there.
    if trio.lowlevel.in_trio_task():
        raise WrongEventLoopError("this is trio, and runtime.aio is for asyncio; use runtime.open and what it gives")
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise WrongEventLoopError(
            "runtime.aio needs a running asyncio loop, and here is none; use it in one, or runtime.open_sync without"
        ) from None


class AioThread(TrioThread[T]):
    """Made, started and ended by one asyncio loop. It ends by itself once that loop is closed or its thread has ended.

    Attributes:
        loop: that asyncio loop.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        """As `TrioThread`.

        Raises: WrongEventLoopError: there is no asyncio loop here.
        """
        self.loop = asyncio_loop()
        self._owner = threading.current_thread()
        super().__init__(make, name)

    async def start(self) -> T:
        """Start, and wait until the context manager has been entered.

        Raises: what entering it raises.

        Cancellation: ends it; waits until that is done.
        """
        self._thread.start()
        try:
            await settled(self._started)
        except asyncio.CancelledError:
            await self._over()
            raise
        except GeneratorExit:
            self.stop()
            raise
        if self._ended.done():
            self._thread.join()
            self._raise_failure()
        return self._value

    async def end(self) -> None:
        """Leave the context manager, and wait for the thread's end; harmless where that is done.

        Raises: what leaving it raises.

        Cancellation: it goes on to the end in any case, and then strikes.
        """
        await self._over()
        self._raise_failure()

    def promise(self) -> Promise[Any]:
        """See `TrioThread.promise`; an `asyncio.Future`."""
        return self.loop.create_future()

    async def _over(self) -> None:
        self.stop()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await settled(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
        # All that is left of the thread by now is its return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    def _raise_failure(self) -> None:
        if isinstance(self._outcome, outcome.Error):
            raise self._outcome.error

    # --- in the thread ----------------------------------------------------------------------------

    def _deliver(self, promise: Promise[Any], value: object) -> bool:
        try:
            self.loop.call_soon_threadsafe(_set_result, promise, value)
        except RuntimeError:
            return False  # the loop is closed
        return True

    def _has_callers(self) -> bool:
        # At the interpreter's exit, a loop in a daemon thread is left as it is, and this thread is waited for.
        owners = self._owner, threading.main_thread()
        return not self.loop.is_closed() and all(owner.is_alive() for owner in owners)


def _set_result(promise: Promise[Any], value: object) -> None:
    if not promise.done():
        promise.set_result(value)


async def settled(promise: Promise[T]) -> T:
    """The result of a promise of an `AioThread`, for which others may wait, too.

    Cancellation: leaves the promise as it is.
    """
    return promise.result() if promise.done() else await asyncio.shield(cast("asyncio.Future[T]", promise))


async def result_of(errand: BridgeCall[T]) -> T:
    """What comes of an errand.

    Cancellation: reaches what is done, and strikes once that has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not errand.done.done():
        try:
            await settled(errand.done)
        except asyncio.CancelledError as error:
            cancelled = error
            errand.cancel()
        except GeneratorExit:
            errand.cancel()
            raise
    if cancelled is not None:
        raise cancelled
    return errand.result()
