"""The consumer's end of a bridge stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.bridge.stream import BridgeStream, S

T = TypeVar("T")
Item = TypeVar("Item")


class IteratorHandle(ABC, Generic[S, T, Item]):
    """An iterator's state in the consumer's thread, over what a source in the trio thread produces.

    Two kinds of subclasses meet in a concrete class. One turns what arrives (T) into items for the consumer (Item):
    `StreamHandle`, `MergedHandle`. The other waits for it: `AsyncIteration` in asyncio, `BlockingIteration` in threads.
    """

    _is_closed = True  # until there is a bridge stream to close
    _is_unread = True  # neither read nor saved

    def __init__(self, bridge: RuntimeBridge[Any], make_source: Callable[[], S]) -> None:
        """No item was given yet.

        Args:
            make_source: makes the source, in the trio thread. It must not refer to this handle: dropping the last
                reference to the handle ends the stream.

        Raises: RuntimeClosedError: the trio thread has ended.
        """
        self._bridge = bridge
        self._bridge_stream: BridgeStream[S, T] = bridge.open_stream(make_source)
        self._arrived: deque[T] = deque()
        self._is_closed = False

    def __del__(self) -> None:
        self._close()

    async def _next(self) -> Item | None:
        """The next item; None once all were given."""
        source = await self._wait_opened()
        if self._must_request(source):
            arrived: Sequence[T] = await self._bridge.result(self._bridge_stream.request_items())
            self._arrived.extend(arrived)
        else:
            # One pass of the loop for each item, also where several arrived at once.
            await self._bridge.pause()
        return self._take_next(source)

    async def _wait_opened(self) -> S:
        """The source, once it was made in the trio thread.

        Raises: what making the source raised.
        """
        if not self._bridge_stream.opened.done():
            await self._bridge.result(self._bridge_stream.opened)
        return self._source_once_opened()

    def _source_once_opened(self) -> S:
        """The source, after the bridge stream has opened.

        Raises: what making the source raised.
        """
        if self._bridge_stream.failure is not None:
            self._close()
            raise self._bridge_stream.failure
        assert self._bridge_stream.source is not None
        return self._bridge_stream.source

    @abstractmethod
    def _must_request(self, source: S) -> bool:
        """Whether the next item must be requested from the trio thread."""

    @abstractmethod
    def _take_next(self, source: S) -> Item | None:
        """The next item, after requested items have arrived; None once all were given.

        Raises: the reason why no further items come, if not all were given.
        """

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._bridge_stream.close()
