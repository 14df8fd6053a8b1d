"""One async function that runs in the trio thread while a caller elsewhere waits for its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from protocol.errors import RuntimeClosedError
from runtime.bridge.trio_thread import BridgeFuture, TrioThread

T = TypeVar("T")


class BridgeCall(Generic[T]):
    """A call of an async function in the trio thread, made by a caller elsewhere.

    Attributes:
        done: resolved once the function has returned, raised or been cancelled.
    """

    def __init__(
        self, thread: TrioThread[Any], check_open: Callable[[], None], function: Callable[[], Awaitable[T]]
    ) -> None:
        """Called in the caller's thread. The function starts soon; calls start in the order in which they were made.

        Args:
            check_open: called first, in the trio thread; raises if the runtime was closed.

        Raises: trio.RunFinishedError: the trio thread has ended.
        """
        self._thread = thread
        self._check_open = check_open
        self._function = function
        self._outcome: outcome.Outcome[T] = outcome.Error(
            RuntimeClosedError("the runtime was closed before this call finished; open another")
        )
        self._scope = trio.CancelScope()
        self.done: BridgeFuture[None] = thread.make_future()
        thread.run_soon(self._start)

    # --- in any thread ----------------------------------------------------------------------------

    def result(self) -> T:
        """The function's result, or its exception; call once, after `done`."""
        return self._outcome.unwrap()

    def cancel(self) -> None:
        """Cancel the function soon; harmless once it is done."""
        try:
            self._thread.run_soon(self._scope.cancel)
        except trio.RunFinishedError:
            return

    # --- in the trio thread -----------------------------------------------------------------------

    def _start(self) -> None:
        # An exception is for the caller; raised from here, it would end the trio loop.
        checked = outcome.capture(self._check_open)
        if isinstance(checked, outcome.Error):
            self._outcome = checked
            self._thread.resolve(self.done, None)
        else:
            self._thread.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                self._outcome = outcome.Value(await self._function())
        except Exception as error:  # for the caller, too
            self._outcome = outcome.Error(error)
        finally:
            self._thread.resolve(self.done, None)
