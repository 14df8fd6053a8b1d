"""One thing that is done in trio's thread, while a caller elsewhere waits for what comes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from protocol.errors import RuntimeClosedError
from runtime.bridge.trio_thread import Promise, TrioThread

T = TypeVar("T")


class BridgeCall(Generic[T]):
    """An async function of trio's, called for a caller elsewhere.

    Attributes:
        done: once nothing more happens.
    """

    def __init__(self, thread: TrioThread[Any], check: Callable[[], None], do: Callable[[], Awaitable[T]]) -> None:
        """Made in the caller's thread; done soon, in the order of the calls.

        Args:
            thread: trio's.
            check: called first, in trio's thread; raises where nothing can be done any more.
            do: does it.

        Raises: trio.RunFinishedError: trio's thread has ended.
        """
        self._thread = thread
        self._check = check
        self._do = do
        self._outcome: outcome.Outcome[T] = outcome.Error(
            RuntimeClosedError("the runtime was closed before this was done; open another")
        )
        self._scope = trio.CancelScope()
        self.done: Promise[None] = thread.promise()
        thread.run_soon(self._begin)

    # --- in any thread ----------------------------------------------------------------------------

    def result(self) -> T:
        """What came of it; once, and only once it is done."""
        return self._outcome.unwrap()

    def cancel(self) -> None:
        """Cancel the function, soon; harmless where it is done."""
        try:
            self._thread.run_soon(self._scope.cancel)
        except trio.RunFinishedError:
            return

    # --- in trio ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        # Whatever it raises is for who waits; here, it would end trio.
        checked = outcome.capture(self._check)
        if isinstance(checked, outcome.Error):
            self._outcome = checked
            self._thread.answer(self.done, None)
        else:
            self._thread.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                self._outcome = outcome.Value(await self._do())
        except Exception as error:  # likewise
            self._outcome = outcome.Error(error)
        finally:
            self._thread.answer(self.done, None)
