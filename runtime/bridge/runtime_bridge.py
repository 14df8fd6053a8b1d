"""The caller's access to a runtime in a trio thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import trio

from actors.mlx.memory import peak_memory
from protocol.errors import RuntimeClosedError
from protocol.statistics import Counts, Statistics
from runtime.bridge.call import BridgeCall
from runtime.bridge.stream import BridgeStream, S
from runtime.bridge.trio_thread import TrioThread
from runtime.engine.runtime import CLOSED
from runtime.engine.runtime import Runtime as TrioRuntime

T = TypeVar("T")
Thread = TypeVar("Thread", bound=TrioThread[Any])


class RuntimeBridge(Generic[Thread]):
    """The access to a runtime from outside its trio thread, shared by the handles of all kinds.

    Attributes:
        thread: the trio thread.
        runtime: the open runtime in that thread.
    """

    def __init__(self, thread: Thread, runtime: TrioRuntime) -> None:
        self.thread = thread
        self.runtime = runtime

    def check_settings(self, settings: dict[str, Any]) -> None:
        """Check the settings of a stream, in the caller's thread.

        Raises: SettingsError, RuntimeClosedError, RuntimeBrokenError: as `runtime.Runtime.stream`.
        """
        self.runtime.check_settings(settings)

    def open_stream(self, make_source: Callable[[], S]) -> BridgeStream[S, Any]:
        """A bridge stream from a source that is made in the trio thread.

        Raises: RuntimeClosedError: the trio thread has ended.
        """
        try:
            return BridgeStream(self.thread, make_source)
        except trio.RunFinishedError:
            raise RuntimeClosedError(CLOSED) from None

    def start_call(self, function: Callable[[], Awaitable[T]]) -> BridgeCall[T]:
        """Call an async function in the trio thread.

        Raises: RuntimeClosedError, RuntimeBrokenError: the runtime is no longer there.
        """
        self.runtime.check_open()
        try:
            return BridgeCall(self.thread, self.runtime.check_open, function)
        except trio.RunFinishedError:
            raise RuntimeClosedError(CLOSED) from None

    def unopened_statistics(self) -> Statistics:
        """The statistics of a stream whose prompt was not checked yet: all counts are zero."""
        return Counts().snapshot(
            elapsed=0.0,
            generation_seconds=0.0,
            time_to_first_token=None,
            peak_memory=peak_memory(),
            estimates=self.runtime.estimates,
        )
