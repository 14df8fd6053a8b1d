"""The events of one runtime, for whoever listens: statistics, traces, benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from protocol.trace import Event


@attrs.define(eq=False)
class Events:
    """Announces every event of a runtime to its listeners, in trio's thread."""

    _listeners: list[Callable[[Event], None]] = attrs.field(init=False, factory=list)
    # Whether anybody listens to instants. They are not made otherwise: there are several a token.
    wants_instants: bool = attrs.field(init=False, default=False)

    def listen(self, listener: Callable[[Event], None], *, only_spans: bool = False) -> None:
        """Have a function called with each event from now on, or at least with each span."""
        self._listeners.append(listener)
        self.wants_instants = self.wants_instants or not only_spans

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
