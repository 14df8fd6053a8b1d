"""Waiting in asyncio for the items of a bridge stream."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self, TypeVar

from protocol.errors import StreamBusyError
from runtime.aio.bridge import AioBridge
from runtime.aio.thread import wait_result
from runtime.bridge.iterator_handle import IteratorHandle
from runtime.bridge.stream import S

T = TypeVar("T")
Item = TypeVar("Item")


class AsyncIteration(IteratorHandle[S, T, Item]):
    """An `IteratorHandle` as an async iterator and async context manager, for one asyncio task at a time."""

    _bridge: AioBridge
    _is_waiting = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        """The next item.

        Raises: as `__anext__` of the class of the same name in `runtime`, and:
            PromptError, SettingsError: of a prompt, at the first call.
            WrongEventLoopError: this is not the loop of the runtime.

        Cancellation: ends the generation, or all of them.
        """
        if (item := await self._next()) is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End the generation, or all of them. Returns at once; closing twice is closing once.

        Cancellation: it is closed in any case.
        """
        self._bridge.check_loop()
        self._close()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _next(self) -> Item | None:
        """The next item; None once all were given."""
        self._bridge.check_loop()
        if self._is_waiting:
            raise StreamBusyError("another task is waiting for the next item; a stream has one consumer")
        self._is_waiting, self._is_unread = True, False
        try:
            source = await self._wait_opened()
            if self._must_request(source):
                arrived = await wait_result(self._bridge_stream.request_items())
                self._arrived.extend(arrived)
            else:
                # One pass of the loop for each item, also where several arrived at once.
                await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self._close()
            raise
        finally:
            self._is_waiting = False
        return self._take_next(source)

    async def _wait_opened(self) -> S:
        """The source, once it was made in the trio thread.

        Raises: what making the source raised.
        """
        await wait_result(self._bridge_stream.opened)
        return self._source_once_opened()
