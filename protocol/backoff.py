"""Backoff: what has failed is left out for a number of times, which doubles with each failure.

A forward pass that fails empties caches, whose texts must be read again, so what may fail again is tried less often.
"""

from __future__ import annotations

import sys

import attrs

# The number of jobs for which the limit is lowered after the first failure.
FIRST_JOBS_LIMITED = 16


@attrs.define
class Backoff:
    """Says how often to leave out something that has failed."""

    _num_next: int = 1
    _num_left: int = attrs.field(default=0, init=False)

    def fail(self) -> None:
        """Count a failure."""
        self._num_left, self._num_next = self._num_next, 2 * self._num_next

    def leaves_out(self) -> bool:
        """Whether to leave it out this time."""
        self._num_left -= 1
        return self._num_left >= 0


@attrs.define
class SharingLimit:
    """How many sessions may share a job (`value`, >= 1): fewer after a job failed whose parts all succeed alone."""

    value: int = sys.maxsize
    _halved: int = attrs.field(default=1, init=False)
    _backoff: Backoff = attrs.field(factory=lambda: Backoff(FIRST_JOBS_LIMITED), init=False)

    def halve(self, num_sessions: int) -> None:
        """Lower the limit, for some jobs, to half the number of sessions that were too many for one job."""
        self.value = self._halved = max(1, num_sessions // 2)
        self._backoff.fail()

    def count_job(self) -> None:
        """Count a job that begins."""
        self.value = self._halved if self._backoff.leaves_out() else sys.maxsize
