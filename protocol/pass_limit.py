"""The pass limit: how many sessions may share a pass after one has failed, as if it had been too large for memory."""

from __future__ import annotations

import attrs

# Passes of fewer sessions than are open, after one that has failed, before more share one again: a failure may cost all
# texts in the pass their caches.
SMALL_PASSES = 256


@attrs.define
class PassLimit:
    """Half as many sessions as were in the pass that failed share one, then twice as many after `SMALL_PASSES`, then
    again after twice as many passes, and so on.
    """

    max_batch: int  # most sessions that share a pass, >= 1
    # Most sessions in the next pass, in [1, max_batch].
    most: int = attrs.field(init=False, default=attrs.Factory(lambda self: self.max_batch, takes_self=True))
    _num_passes: int = attrs.field(default=0, init=False)
    _most_passes: int = attrs.field(default=SMALL_PASSES, init=False)

    def fail(self, num_sessions: int) -> None:
        """Note that a pass over so many sessions has failed."""
        self._num_passes, self.most = 0, max(1, num_sessions // 2)

    def lift(self) -> None:
        """Note that the size of a pass was not why it has failed."""
        self.most = self.max_batch

    def settle(self, num_open: int) -> None:
        """Note how many sessions are open: if they fit into one pass, they are fewer than when it failed."""
        if num_open <= self.most:
            self.most, self._most_passes = self.max_batch, SMALL_PASSES

    def count_pass(self) -> None:
        """Note a pass that has not failed."""
        if self.most == self.max_batch:
            return
        self._num_passes += 1
        if self._num_passes >= self._most_passes:
            self._num_passes, self._most_passes = 0, 2 * self._most_passes
            self.most = min(self.max_batch, 2 * self.most)
