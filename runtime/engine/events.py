"""The events of one runtime, for whoever listens: statistics, traces, benchmarks."""

from __future__ import annotations

from collections.abc import Callable

from protocol.trace import Event


class Events:
    """Announces every event of a runtime to its listeners, in trio's thread."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Event], None]] = []

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have a function called with each event from now on."""
        self._listeners.append(listener)

    def __call__(self, event: Event) -> None:
        """Announce an event."""
        for listener in self._listeners:
            listener(event)
