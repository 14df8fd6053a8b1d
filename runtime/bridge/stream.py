"""Carries items from a source in the trio thread to a consumer elsewhere, as the consumer requests them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import outcome
import trio

from runtime.bridge.trio_thread import BridgeFuture, TrioThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Where the items of a bridge stream come from; used in the trio thread."""

    async def receive(self) -> Sequence[T_co]:
        """Wait for an item, and return all that have arrived; an empty sequence at the end.

        Cancellation: takes no item.
        """
        ...

    def drain(self) -> Sequence[T_co]:
        """All items that have arrived, without waiting. Called once, at the end."""
        ...

    def close(self) -> None:
        """Stop the source, so that no further items arrive. Never waits; closing twice is closing once."""
        ...


S = TypeVar("S", bound=Source[Any])


class BridgeStream(Generic[S, T]):
    """A stream of items from a source in the trio thread to one consumer in another thread.

    Items are received only on request, so that a slow consumer slows the source down as a consumer in trio would. One
    request brings all items that have arrived since the last one.

    Attributes:
        opened: resolved once the source was made, or could not be.
        source: the source, once it was made.
        failure: what making the source raised, if it did.
    """

    def __init__(self, thread: TrioThread[Any], make_source: Callable[[], S]) -> None:
        """Called in the consumer's thread. The source is made soon; sources are made in the order of the calls.

        Args:
            make_source: makes the source in the trio thread; never waits.

        Raises: trio.RunFinishedError: the trio thread has ended.
        """
        self.source: S | None = None
        self.failure: BaseException | None = None
        self._thread = thread
        self._make_source: Callable[[], S] | None = make_source
        self.opened: BridgeFuture[None] = thread.make_future()
        self._scope = trio.CancelScope()
        self._is_requested = trio.Event()
        self._reply: BridgeFuture[Sequence[T]] | None = None
        self._leftover_items: Sequence[T] = ()
        self._is_over = False
        thread.run_soon(self._open)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes, because the source is closed, could not be made, or trio's thread has ended."""
        return self._is_over

    # --- for the consumer -------------------------------------------------------------------------

    def request_items(self) -> BridgeFuture[Sequence[T]]:
        """A future for the items since the last request: one or more, or none at the end.

        A consumer that abandons the future loses its items.
        """
        reply: BridgeFuture[Sequence[T]] = self._thread.make_future()
        try:
            self._thread.run_soon(self._accept_request, reply)
        except trio.RunFinishedError:
            reply.set_result(self._take_leftover_items())
        return reply

    # --- in any thread ----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the source soon; harmless once the stream is over."""
        try:
            self._thread.run_soon(self._close)
        except trio.RunFinishedError:
            return

    # --- in the trio thread -----------------------------------------------------------------------

    def _open(self) -> None:
        assert self._make_source is not None
        # An exception is for the consumer; raised from here, it would end the trio loop.
        made = outcome.capture(self._make_source)
        self._make_source = None
        if isinstance(made, outcome.Error):
            self.failure, self._is_over = made.error, True
        else:
            self.source = made.unwrap()
            self._thread.nursery.start_soon(self._answer_requests, self.source)
        self._thread.resolve(self.opened, None)

    def _accept_request(self, reply: BridgeFuture[Sequence[T]]) -> None:
        self._reply = reply
        if self._is_over:
            self._send(self._take_leftover_items())
        else:
            self._is_requested.set()

    def _close(self) -> None:
        self._scope.cancel()
        if self.source is not None:
            # Now, and not when the task is cancelled: the consumer's next call may rely on the source being closed.
            self.source.close()

    async def _answer_requests(self, source: S) -> None:
        try:
            with self._scope:
                items: Sequence[T] | None = None
                while items is None or items:
                    await self._is_requested.wait()
                    self._is_requested = trio.Event()
                    items = await source.receive()
                    self._send(items)
        finally:
            self._is_over = True
            self._leftover_items = source.drain()
            source.close()
            if self._reply is not None:
                self._send(self._take_leftover_items())

    def _send(self, items: Sequence[T]) -> None:
        reply, self._reply = self._reply, None
        assert reply is not None
        self._thread.resolve(reply, items)

    def _take_leftover_items(self) -> Sequence[T]:
        items, self._leftover_items = self._leftover_items, ()
        return items
