"""Carries what comes in trio's thread to a consumer elsewhere: when it asks, and then as much as is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import outcome
import trio

from runtime.bridge.trio_thread import Promise, TrioThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Where it comes from; used in trio's thread."""

    async def take(self) -> Sequence[T_co]:
        """Wait for something, and return all that is there; nothing once nothing more comes.

        Cancellation: takes nothing.
        """
        ...

    def rest(self) -> Sequence[T_co]:
        """All that is there, without waiting. Asked once, at the end."""
        ...

    def close(self) -> None:
        """Have nothing more come. Never waits; closing twice is closing once."""
        ...


S = TypeVar("S", bound=Source[Any])


class BridgeStream(Generic[S, T]):
    """Between a source and its consumer.

    Nothing is fetched that was not asked for, so that a slow consumer slows the source as one in trio would. The way
    there and back is gone once for all that has come meanwhile.

    Attributes:
        begun: once the source was made, or could not be.
        source: once it was made.
        failure: what making it raised, if it did.
    """

    def __init__(self, thread: TrioThread[Any], make_source: Callable[[], S]) -> None:
        """Made in the consumer's thread; the source is made soon, in the order of the calls.

        Args:
            thread: trio's.
            make_source: makes it, in trio's thread; never waits.

        Raises: trio.RunFinishedError: trio's thread has ended.
        """
        self.source: S | None = None
        self.failure: BaseException | None = None
        self._thread = thread
        self._make_source: Callable[[], S] | None = make_source
        self.begun: Promise[None] = thread.promise()
        self._scope = trio.CancelScope()
        self._asked = trio.Event()
        self._reply: Promise[Sequence[T]] | None = None
        self._rest: Sequence[T] = ()
        self._is_over = False
        thread.run_soon(self._begin)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes, because the source is closed, could not be made, or trio's thread has ended."""
        return self._is_over

    # --- for the consumer -------------------------------------------------------------------------

    def ask(self) -> Promise[Sequence[T]]:
        """What has come since the last time, as soon as there is something; nothing once nothing more comes.

        A consumer that does not wait for it any more loses what it brings.
        """
        reply: Promise[Sequence[T]] = self._thread.promise()
        try:
            self._thread.run_soon(self._ask, reply)
        except trio.RunFinishedError:
            reply.set_result(self._take_rest())
        return reply

    # --- in any thread ----------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Have nothing more come, soon; harmless where nothing does."""
        try:
            self._thread.run_soon(self._end)
        except trio.RunFinishedError:
            return

    # --- in trio ----------------------------------------------------------------------------------

    def _begin(self) -> None:
        assert self._make_source is not None
        # Whatever it raises is for the consumer; here, it would end trio.
        made = outcome.capture(self._make_source)
        self._make_source = None
        if isinstance(made, outcome.Error):
            self.failure, self._is_over = made.error, True
        else:
            self.source = made.unwrap()
            self._thread.nursery.start_soon(self._carry, self.source)
        self._thread.answer(self.begun, None)

    def _ask(self, reply: Promise[Sequence[T]]) -> None:
        self._reply = reply
        if self._is_over:
            self._send(self._take_rest())
        else:
            self._asked.set()

    def _end(self) -> None:
        self._scope.cancel()
        if self.source is not None:
            # At once, and not when the task hears of it: what comes next may build on its being over.
            self.source.close()

    async def _carry(self, source: S) -> None:
        try:
            with self._scope:
                items: Sequence[T] | None = None
                while items is None or items:
                    await self._asked.wait()
                    self._asked = trio.Event()
                    items = await source.take()
                    self._send(items)
        finally:
            self._is_over = True
            self._rest = source.rest()
            source.close()
            if self._reply is not None:
                self._send(self._take_rest())

    def _send(self, items: Sequence[T]) -> None:
        reply, self._reply = self._reply, None
        assert reply is not None
        self._thread.answer(reply, items)

    def _take_rest(self) -> Sequence[T]:
        rest, self._rest = self._rest, ()
        return rest
