"""One thing that is done in trio's thread, while a task in asyncio waits for what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import outcome
import trio

from protocol.errors import RuntimeClosedError
from runtime.trio_thread import TrioThread

T = TypeVar("T")


class Errand(Generic[T]):
    """An async function of trio's, called for a task in asyncio."""

    def __init__(self, thread: TrioThread[Any], check: Callable[[], None], do: Callable[[], Awaitable[T]]) -> None:
        """Made in asyncio's thread; done soon, in the order of the calls.

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
            RuntimeClosedError("the runtime was closed before this was done; open another with runtime.aio.open()")
        )
        self._scope = trio.CancelScope()
        self._done: asyncio.Future[None] = thread.loop.create_future()
        thread.run_soon(self._begin)

    # --- in asyncio -------------------------------------------------------------------------------

    async def result(self) -> T:
        """What comes of it.

        Cancellation: reaches the function, and strikes once that has ended.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self._done.done():
            try:
                await asyncio.shield(self._done)
            except asyncio.CancelledError as error:
                cancelled = error
                self._cancel()
            except GeneratorExit:
                self._cancel()
                raise
        if cancelled is not None:
            raise cancelled
        return self._outcome.unwrap()

    def _cancel(self) -> None:
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
            self._thread.answer(self._done, None)
        else:
            self._thread.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                self._outcome = outcome.Value(await self._do())
        except Exception as error:  # likewise
            self._outcome = outcome.Error(error)
        finally:
            self._thread.answer(self._done, None)
