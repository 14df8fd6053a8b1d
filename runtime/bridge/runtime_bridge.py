"""The caller's access to a runtime in a trio thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import trio

from protocol.errors import RuntimeClosedError
from runtime.bridge.trio_thread import BridgeCall, BridgeStream, S, TrioThread
from runtime.engine.runtime import CLOSED
from runtime.engine.runtime import Runtime as TrioRuntime

T = TypeVar("T")


class RuntimeBridge(ABC):
    """The access to a runtime from outside its trio thread; a subclass says how its callers wait.

    Attributes:
        thread: the trio thread.
        runtime: the open runtime in that thread.
        face: the module whose handles these are, "aio" or "sync".
        how_to_close: the call that closes a stream, for messages.
        may_await: whether async functions of a user are awaited.
    """

    face: ClassVar[str]
    how_to_close: ClassVar[str]
    may_await: ClassVar[bool]

    def __init__(self, thread: TrioThread, runtime: TrioRuntime) -> None:
        self.thread = thread
        self.runtime = runtime

    def check_loop(self) -> None:  # noqa: B027 (without an event loop, there is nothing to check)
        """Raises: WrongEventLoopError: the event loop that is running here is not the runtime's."""

    def check_caller(self) -> None:
        """Raises: WrongEventLoopError: as `check_loop`, or waiting here would block an event loop."""
        self.check_loop()

    @abstractmethod
    async def call_result(self, call: BridgeCall[T]) -> T:
        """The result of a call. A cancellation cancels the call, and is raised once the call has ended."""

    @abstractmethod
    async def pause(self) -> None:
        """Let other tasks of the caller's event loop take their turns."""

    @abstractmethod
    async def call_function(self, function: Callable[[], Any]) -> Any:
        """Call a user's function that is not async."""

    @abstractmethod
    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """What a method that waits returns: the coroutine, or without an event loop its result."""

    @abstractmethod
    def iterated(self, items: Any) -> AsyncIterator[Any]:
        """An async iterable of the caller's event loop, for the trio thread. Raises: PromptError: there is no loop."""

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call an async function in the trio thread, and wait as `call_result`.

        Raises: as the function and `check_caller`, and RuntimeClosedError, RuntimeBrokenError.
        """
        self.check_caller()
        self.runtime.check_open()
        try:
            call = BridgeCall(self.thread, self.runtime.check_open, function)
        except trio.RunFinishedError:
            raise RuntimeClosedError(CLOSED) from None
        return await self.call_result(call)

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check the settings of a stream, in the caller's thread. Raises: as `check_caller` and `Runtime.stream`."""
        self.check_caller()
        self.runtime.check_settings(settings)

    def open_stream(self, make_source: Callable[[], S]) -> BridgeStream[S, Any]:
        """A bridge stream from a source. Raises: RuntimeClosedError: the trio thread has ended."""
        check_open = self.runtime.check_open  # alone: nothing in the trio thread may refer to this bridge

        def make_while_open() -> S:
            check_open()
            return make_source()

        try:
            return BridgeStream(self.thread, make_while_open)
        except trio.RunFinishedError:
            raise RuntimeClosedError(CLOSED) from None
