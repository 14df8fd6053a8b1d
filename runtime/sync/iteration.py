"""Blocking for the items of a bridge stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

from protocol.errors import StreamBusyError
from runtime.bridge.iterator_handle import IteratorHandle
from runtime.bridge.stream import S
from runtime.sync.bridge import SyncBridge
from runtime.sync.thread import wait_result

T = TypeVar("T")
Item = TypeVar("Item")


class BlockingIteration(IteratorHandle[S, T, Item]):
    """An `IteratorHandle` as an iterator and context manager, for one thread at a time."""

    _bridge: SyncBridge

    def __init__(self, bridge: SyncBridge, make_source: Callable[[], S]) -> None:
        """As `IteratorHandle`; blocks until the source was made.

        Raises: what making the source raised.

        Interrupting: a Ctrl-C closes the stream.
        """
        super().__init__(bridge, make_source)
        self._in_use = threading.Lock()
        try:
            wait_result(self._bridge_stream.opened)
            self._source_once_opened()
        except BaseException:  # a Ctrl-C, too
            self._close()
            raise

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """The next item.

        Raises: as `__anext__` of the class of the same name in `runtime`, and:
            StreamBusyError: another thread is waiting for an item.

        Interrupting: a Ctrl-C ends the generation, or all of them.
        """
        is_ours = False
        try:
            is_ours = self._in_use.acquire(blocking=False)
            if is_ours:
                self._is_unread = False
                return self._next()
        except BaseException:
            # Any exception, StopIteration and a Ctrl-C included, ends the iteration.
            self._close()
            raise
        finally:
            if is_ours:
                self._in_use.release()
        raise StreamBusyError("another thread is waiting for the next item; a stream has one consumer")

    def close(self) -> None:
        """End the generation, or all of them. Returns at once; closing twice is closing once. For any thread."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _next(self) -> Item:
        source = self._source_once_opened()
        if self._must_request(source):
            arrived = wait_result(self._bridge_stream.request_items())
            self._arrived.extend(arrived)
        if (item := self._take_next(source)) is None:
            raise StopIteration
        return item
