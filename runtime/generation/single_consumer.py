"""The base of the async iterators that a user reads: one consumer at a time, closed by whatever ends it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import trio

from protocol.errors import StreamBusyError

T = TypeVar("T")


class SingleConsumer(ABC):
    """An async iterator and async context manager that one task reads at a time.

    A subclass implements `__anext__` with `_receive`, and `close`.
    """

    _busy: ClassVar[str]  # message of the error that a second consumer gets

    _is_waiting = False  # a task waits in `_receive`
    _is_closed = False

    @abstractmethod
    def close(self) -> None:
        """End at once, without a checkpoint; closing twice is closing once. For trio's thread."""

    def __aiter__(self) -> Self:
        return self

    async def aclose(self) -> None:
        """End the generation, or all of them. Returns at once; closing twice is closing once.

        Cancellation: a checkpoint; it is closed in any case.
        """
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _receive(self, receive: Callable[[], Awaitable[T]]) -> T:
        """The result of `receive`, which may wait.

        Raises: StreamBusyError: another task is waiting; and what `receive` raises.

        Cancellation: closes this.
        """
        if self._is_waiting:
            raise StreamBusyError(self._busy)
        self._is_waiting = True
        try:
            return await receive()
        except trio.Cancelled:
            self.close()
            raise
        finally:
            self._is_waiting = False
