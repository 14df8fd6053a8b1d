"""A trio loop in a thread of its own, for callers in other threads.

Why a thread and not trio's guest mode: in a thread, trio's tasks and the tokenising of a prompt never block the
callers, and neither event loop has to handle the other's signals or shutdown.
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

# Seconds between two checks whether the callers still exist: a closed event loop notifies nobody.
CALLER_CHECK_INTERVAL_S = 0.2


class BridgeFuture(Protocol[T]):
    """A result that a caller waits for and the trio thread sets, such as an `asyncio.Future`."""

    def done(self) -> bool:
        """Whether the result was set."""
        ...

    def result(self) -> T:
        """The result; only after `done`."""
        ...

    def set_result(self, result: T, /) -> None:
        """Set the result; once."""
        ...


class TrioThread(ABC, Generic[T]):
    """A thread that runs a trio loop and holds one async context manager open in it.

    Subclasses say how callers wait: `AioThread` for an asyncio loop, `SyncThread` for plain threads. The thread ends by
    itself soon after its callers are gone.

    Attributes:
        nursery: for background tasks in the trio loop; cancelled after the context manager was left.
    """

    nursery: trio.Nursery
    _value: T

    def __init__(self, make_manager: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        """The thread is not started yet.

        Args:
            make_manager: makes the context manager, in the trio loop.
        """
        self._make_manager = make_manager
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._is_stopping = False
        self._is_entered = False
        self._is_exit_requested = trio.Event()
        self._started: BridgeFuture[None] = self.make_future()
        self._ended: BridgeFuture[None] = self.make_future()
        self._outcome: outcome.Outcome[None] = outcome.Value(None)
        # Not a daemon: it owns the models' threads, and a forward pass at the interpreter's exit aborts the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    # --- for callers ------------------------------------------------------------------------------

    @abstractmethod
    def make_future(self) -> BridgeFuture[Any]:
        """A future for the calling thread."""

    # --- in any thread ----------------------------------------------------------------------------

    def run_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call a function in the trio loop; functions run in the order of these calls. It must not raise.

        Raises: trio.RunFinishedError: the loop has ended, and the function will not be called.
        """
        assert self._token is not None, "not started"
        self._token.run_sync_soon(function, *args)

    def stop(self) -> None:
        """Start to leave the context manager; harmless if the thread is leaving or has ended."""
        self._is_stopping = True
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._request_exit)
            except trio.RunFinishedError:
                return

    def _raise_failure(self) -> None:
        """Raises: what entering or leaving the context manager raised. Call once the thread has ended."""
        if isinstance(self._outcome, outcome.Error):
            raise self._outcome.error

    # --- in the trio thread -----------------------------------------------------------------------

    def resolve(self, future: BridgeFuture[Any], value: object) -> None:
        """Set a future's result, unless nobody waits for it any more."""
        if not self._deliver(future, value):
            self.stop()

    @abstractmethod
    def _deliver(self, future: BridgeFuture[Any], value: object) -> bool:
        """Set a future's result; results arrive in the order of the calls. False if there are no callers any more."""

    @abstractmethod
    def _has_callers(self) -> bool:
        """Whether anybody can still use the context manager's value."""

    def _run(self) -> None:
        self._outcome = outcome.capture(trio.run, self._main)
        if "mlx.core" in sys.modules:  # it may have been imported in this thread
            import_module("actors.workers.thread_pool").release_streams()
        # In this order: a caller that waits for the start then finds that the thread has ended.
        self.resolve(self._ended, None)
        self.resolve(self._started, None)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        # The nursery is outside: background tasks first see the context manager close, and then their cancellation.
        async with BackgroundNursery() as self.nursery:
            self.nursery.start_soon(self._stop_without_callers)
            with self._scope:
                if self._is_stopping:
                    self._scope.cancel()
                async with self._make_manager() as self._value:
                    self.resolve(self._started, None)
                    self._is_entered = True
                    await self._is_exit_requested.wait()

    def _request_exit(self) -> None:
        # Once entered, not by cancelling: that would cancel the actors at the same time as the code that ends them.
        if self._is_entered:
            self._is_exit_requested.set()
        else:
            self._scope.cancel()

    async def _stop_without_callers(self) -> None:
        while self._has_callers():  # noqa: ASYNC110 (a closed loop sends no event)
            await trio.sleep(CALLER_CHECK_INTERVAL_S)
        self._request_exit()
