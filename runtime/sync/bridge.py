"""The access of plain threads to a runtime in a trio thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from protocol.errors import WrongEventLoopError
from runtime.bridge.runtime_bridge import RuntimeBridge
from runtime.engine.runtime import Runtime as TrioRuntime
from runtime.sync.thread import SyncThread, call_result

T = TypeVar("T")


class SyncBridge(RuntimeBridge[SyncThread[TrioRuntime]]):
    """`RuntimeBridge` for plain threads.

    The trio thread stops once the bridge is dropped: the runtime's handle, its streams and its conversations refer to
    the bridge, and nothing in the trio thread does.
    """

    def __del__(self) -> None:
        self.thread.stop()

    def check_settings(self, settings: dict[str, Any]) -> None:
        """As `RuntimeBridge.check_settings`, after `check_not_in_trio`."""
        check_not_in_trio("this")
        super().check_settings(settings)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call an async function in the trio thread, and block for its result.

        Raises: as the function, `check_not_in_trio` and `RuntimeBridge.start_call`.

        Interrupting: a Ctrl-C cancels the function, and is raised once it has ended.
        """
        check_not_in_trio("this")
        return call_result(self.start_call(function))


def check_not_in_trio(what: str) -> None:
    """Raises: WrongEventLoopError: trio is running in this thread, and `what` would block it."""
    # Including the trio loop of the runtime: a trace function that waited for it there would wait forever.
    if trio.lowlevel.in_trio_run():
        raise WrongEventLoopError(
            f"{what} would block this trio program; use `async with runtime.open(…) as rt` and `await rt.generate(…)`"
        )
