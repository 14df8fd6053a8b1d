"""The access of an asyncio loop to a runtime in a trio thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from protocol.errors import WrongEventLoopError
from runtime.aio.event_loop import asyncio_loop
from runtime.aio.thread import AioThread, call_result
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.engine.runtime import Runtime as TrioRuntime

T = TypeVar("T")


class AioBridge(RuntimeBridge[AioThread[TrioRuntime]]):
    """`RuntimeBridge` for one asyncio loop."""

    def check_loop(self) -> None:
        """Raises: WrongEventLoopError: this is not the loop that the runtime was opened in."""
        if asyncio_loop() is not self.thread.loop:
            raise WrongEventLoopError(
                "this runtime belongs to another asyncio loop; open one in this loop, or hand the work over to that one"
            )

    def check_settings(self, settings: dict[str, Any]) -> None:
        """As `RuntimeBridge.check_settings`, after `check_loop`."""
        self.check_loop()
        super().check_settings(settings)

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call an async function in the trio thread, and wait for its result.

        Raises: as the function, `check_loop` and `RuntimeBridge.start_call`.

        Cancellation: cancels the function, and is raised once the function has ended.
        """
        self.check_loop()
        return await call_result(self.start_call(function))
