"""Who has a turn at the target: what was handed to it, and for how long that will keep it busy.

Where several streams share a target, it need not wait for one of them to be drafted for: it has the others' passes to
go on with. So time in which it has those is no price of drafting.
"""

from __future__ import annotations

import attrs


@attrs.define
class TargetQueue:
    """Passes that were handed to the target and are not done; it does them in that order, at most one a session."""

    _handed: dict[int, float] = attrs.field(factory=dict, init=False)  # by session, seconds that it is expected to take
    _began: float = attrs.field(default=0.0, init=False)  # the first of them; where there is none, when the last ended

    def enter(self, session: int, seconds: float, now: float) -> None:
        """Take note of a pass that was handed in, and what it is expected to take."""
        if not self._handed:
            self._began = now
        self._handed[session] = seconds

    def leave(self, session: int, now: float) -> None:
        """Take note that it is done, or was taken back; harmless where there is none."""
        if self._handed.pop(session, None) is not None:
            self._began = now

    @property
    def is_busy(self) -> bool:
        """Whether the target has anything to do."""
        return bool(self._handed)

    def was_busy_since(self, moment: float) -> bool:
        """Whether it has had anything to do at any time from a moment on."""
        return self.is_busy or self._began > moment

    def of_others(self, session: int) -> float:
        """Seconds that the passes of others take, the one that has begun included."""
        return sum(seconds for other, seconds in self._handed.items() if other != session)

    def left(self, now: float) -> float:
        """Seconds until all that was handed in is done, >= 0."""
        first = next(iter(self._handed.values()), 0.0)
        return max(0.0, self._began + first - now) + sum(self._handed.values()) - first
