"""The target queue: the passes that the target was handed, and how long they will keep it busy.

Where several sessions share a target, it need not wait for one session's drafter: it works on the other sessions'
passes meanwhile. So drafting that happens behind those passes costs the target nothing.
"""

from __future__ import annotations

import attrs


@attrs.define
class TargetQueue:
    """Passes that were handed to the target and are not done. They run in that order, at most one a session."""

    _expected_s: dict[int, float] = attrs.field(factory=dict, init=False)  # by session: how long its pass should take
    # When the first pass in the queue began; when the last one ended, if the queue is empty.
    _first_began_s: float = attrs.field(default=0.0, init=False)

    def enter(self, session: int, expected_s: float, now_s: float) -> None:
        """Add a pass that was handed to the target.

        Args:
            session: whose pass.
            expected_s: seconds that it should take.
            now_s: seconds on the actors' clock.
        """
        if not self._expected_s:
            self._first_began_s = now_s
        self._expected_s[session] = expected_s

    def leave(self, session: int, now_s: float) -> None:
        """Remove a session's pass, which is done or was taken back; does nothing where there is none."""
        if self._expected_s.pop(session, None) is not None:
            self._first_began_s = now_s

    @property
    def is_busy(self) -> bool:
        """Whether the target has a pass to do."""
        return bool(self._expected_s)

    def was_busy_since(self, moment_s: float) -> bool:
        """Whether the target has had a pass to do at any time since a moment on the actors' clock."""
        return self.is_busy or self._first_began_s > moment_s

    def others_s(self, session: int) -> float:
        """Seconds that the other sessions' passes take in all, the one under way included in full."""
        return sum(seconds for other, seconds in self._expected_s.items() if other != session)

    def remaining_s(self, now_s: float) -> float:
        """Seconds until every pass in the queue is done, >= 0."""
        first_s = next(iter(self._expected_s.values()), 0.0)
        return max(0.0, self._first_began_s + first_s - now_s) + sum(self._expected_s.values()) - first_s
