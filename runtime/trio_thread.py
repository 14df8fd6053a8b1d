"""A trio loop in a thread of its own, beside an asyncio loop that wants something of it.

A thread, and not trio's guest mode: what trio's tasks do between two forward passes, and what it takes to tokenise a
prompt, then never holds up the other loop's callbacks, and neither loop has to know of the other's signals or of its
end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar, TypeVarTuple

import outcome
import trio

from protocol.errors import WrongEventLoopError
from runtime.nursery import BackgroundNursery

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Seconds between two looks at whether the asyncio loop is still there: a loop that is closed tells nobody.
LOOK_EVERY = 0.2


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
            "runtime.aio needs a running asyncio loop, and here is none; use it in one, or runtime.generate_sync"
        ) from None


class TrioThread(Generic[T]):
    """Holds an async context manager of trio's open, in a thread.

    Made, started and ended by one asyncio loop. It ends by itself, soon, once that loop is closed or its thread has
    ended.

    Attributes:
        loop: that asyncio loop.
        nursery: in trio, for what goes on beside; cancelled once the context manager has been left.
    """

    nursery: trio.Nursery
    _value: T

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        """Not started yet.

        Args:
            make: makes the context manager, in trio.
            name: of the thread.

        Raises: WrongEventLoopError: there is no asyncio loop here.
        """
        self.loop = asyncio_loop()
        self._owner = threading.current_thread()
        self._make = make
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._is_stopping = False
        self._is_entered = False
        self._left = trio.Event()
        self._started: asyncio.Future[None] = self.loop.create_future()
        self._ended: asyncio.Future[None] = self.loop.create_future()
        self._outcome: outcome.Outcome[None] = outcome.Value(None)
        # Not a daemon: threads of models hang on it, which must not be in mid-forward when the interpreter exits.
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    # --- in asyncio -------------------------------------------------------------------------------

    async def start(self) -> T:
        """Start, and wait until the context manager has been entered.

        Raises: what entering it raises.

        Cancellation: ends it; waits until that is done.
        """
        self._thread.start()
        try:
            await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self._over()
            raise
        except GeneratorExit:
            self.stop()
            raise
        if self._ended.done():
            self._thread.join()
            self._outcome.unwrap()
        return self._value

    async def end(self) -> None:
        """Leave the context manager, and wait for the thread's end.

        Raises: what leaving it raises.

        Cancellation: it goes on to the end in any case, and then strikes.
        """
        await self._over()
        self._outcome.unwrap()

    async def _over(self) -> None:
        self.stop()
        cancelled: asyncio.CancelledError | None = None
        while not self._ended.done():
            try:
                await asyncio.shield(self._ended)
            except asyncio.CancelledError as error:
                cancelled = error
        # All that is left of the thread by now is its return.
        self._thread.join()
        if cancelled is not None:
            raise cancelled

    # --- in any thread ----------------------------------------------------------------------------

    def run_soon(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have a function called in trio, after those that were handed in before.

        Raises: trio.RunFinishedError: it never will be.
        """
        assert self._token is not None, "not started"
        self._token.run_sync_soon(call, *args)

    def stop(self) -> None:
        """Begin to leave; harmless where that has begun or is done."""
        self._is_stopping = True
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._begin_to_leave)
            except trio.RunFinishedError:
                return

    def tell(self, call: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have a function called in asyncio, after those that were handed in before; never, if the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            self.stop()

    def answer(self, future: asyncio.Future[Any], value: object) -> None:
        """Give a future of asyncio's its result, unless nobody waits for that any more."""
        self.tell(_set_result, future, value)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        self._outcome = outcome.capture(trio.run, self._main)
        self.tell(self._settle)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # The nursery is outside: what goes on in it hears first of how the context manager was left.
        async with BackgroundNursery() as self.nursery:
            self.nursery.start_soon(self._stop_with_the_loop)
            with self._scope:
                if self._is_stopping:
                    self._scope.cancel()
                async with self._make() as self._value:
                    self.answer(self._started, None)
                    self._is_entered = True
                    await self._left.wait()

    def _begin_to_leave(self) -> None:
        # Not by cancelling, where there is something to leave: that would strike all that is at work in it at the same
        # time as who looks after its end.
        if self._is_entered:
            self._left.set()
        else:
            self._scope.cancel()

    async def _stop_with_the_loop(self) -> None:
        # At the interpreter's exit, a loop in a daemon thread is left as it is, and this thread is waited for.
        owners = self._owner, threading.main_thread()
        while not self.loop.is_closed() and all(owner.is_alive() for owner in owners):  # noqa: ASYNC110 (no events)
            await trio.sleep(LOOK_EVERY)
        self._begin_to_leave()

    # --- back in asyncio --------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._started.done():
            self._started.set_result(None)
        self._ended.set_result(None)


def _set_result(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)
