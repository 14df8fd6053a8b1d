"""A trio loop in a thread of its own, for callers in other threads.

A thread, and not trio's guest mode: what trio's tasks do between two forward passes, and what it takes to tokenise a
prompt, then never holds up the callers, and no event loop has to know of the other's signals or of its end.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple

import outcome
import trio

from runtime.engine.nursery import BackgroundNursery

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Seconds between two looks at whether the callers are still there: a loop that is closed tells nobody.
LOOK_EVERY = 0.2


class Promise(Protocol[T]):
    """What a caller waits for, such as an `asyncio.Future`."""

    def done(self) -> bool:
        """Whether it has its result."""
        ...

    def result(self) -> T:
        """The result; only where `done`."""
        ...

    def set_result(self, result: T, /) -> None:
        """Give it its result, once."""
        ...


class TrioThread(ABC, Generic[T]):
    """Holds an async context manager of trio's open, in a thread.

    How callers wait is left to subclasses: `AioThread` for an asyncio loop, `SyncThread` for plain threads. The thread
    ends by itself, soon, once there are no callers any more.

    Attributes:
        nursery: in trio, for what goes on beside; cancelled once the context manager has been left.
    """

    nursery: trio.Nursery
    _value: T

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        """Not started yet.

        Args:
            make: makes the context manager, in trio.
            name: of the thread.
        """
        self._make = make
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._is_stopping = False
        self._is_entered = False
        self._left = trio.Event()
        self._started: Promise[None] = self.promise()
        self._ended: Promise[None] = self.promise()
        self._outcome: outcome.Outcome[None] = outcome.Value(None)
        # Not a daemon: threads of models hang on it, which must not be in mid-forward when the interpreter exits.
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    # --- for callers ------------------------------------------------------------------------------

    @abstractmethod
    def promise(self) -> Promise[Any]:
        """Something to wait for, in the calling thread."""

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

    # --- in the thread ----------------------------------------------------------------------------

    def answer(self, promise: Promise[Any], value: object) -> None:
        """Give a promise its result, unless nobody waits for that any more."""
        if not self._deliver(promise, value):
            self.stop()

    @abstractmethod
    def _deliver(self, promise: Promise[Any], value: object) -> bool:
        """Give a promise its result, after those before; False if there are no callers any more."""

    @abstractmethod
    def _has_callers(self) -> bool:
        """Whether anybody can still use what this holds."""

    def _run(self) -> None:
        self._outcome = outcome.capture(trio.run, self._main)
        if "mlx.core" in sys.modules:  # it may have been imported here
            import_module("actors.workers.thread_pool").release_streams()
        # In this order: who waits for the start then sees that it has come to nothing.
        self.answer(self._ended, None)
        self.answer(self._started, None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # The nursery is outside: what goes on in it hears first of how the context manager was left.
        async with BackgroundNursery() as self.nursery:
            self.nursery.start_soon(self._stop_without_callers)
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

    async def _stop_without_callers(self) -> None:
        while self._has_callers():  # noqa: ASYNC110 (no events)
            await trio.sleep(LOOK_EVERY)
        self._begin_to_leave()
