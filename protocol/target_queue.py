"""The target's queue: the rounds that were handed to the target, by which a drafter knows how long it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import attrs


@attrs.define
class TargetQueue:
    """The rounds that were handed to the target and are not done, at most one a session, and how long they will keep it
    busy. Drafting that happens behind other sessions' passes costs the target nothing.
    """

    seconds: Callable[[float], float] = lambda rows: 0.0  # what a pass costs by its rows; 0 where that is not known
    max_batch: int = 1  # most rounds in one pass, >= 1
    _waiting: dict[int, int] = attrs.field(factory=dict, init=False)  # by session: tokens to feed
    _running: dict[int, int] = attrs.field(factory=dict, init=False)
    _began_s: float = attrs.field(default=0.0, init=False)  # when the running pass began, or the last one ended
    _read_until_s: float = attrs.field(default=-math.inf, init=False)  # when a prompt was last read; inf: one is

    def enter(self, session: int, num_tokens: int) -> None:
        """Add a session's round, which waits for a pass and feeds `num_tokens` tokens, >= 1."""
        self._waiting[session] = num_tokens

    def begin(self, sessions: Iterable[int], now_s: float) -> None:
        """Begin a pass that these of the waiting sessions share."""
        self._waiting |= self._running
        self._running = {session: self._waiting.pop(session) for session in sessions if session in self._waiting}
        self._began_s = now_s

    def begin_again(self, now_s: float) -> None:
        """End the running pass, and begin another one over one more token of each of its sessions."""
        self._running = dict.fromkeys(self._running, 1)
        self._began_s = now_s

    def leave(self, session: int, now_s: float) -> None:
        """Remove a session's round, which is done or was taken back; does nothing where there is none."""
        if (self._running if session in self._running else self._waiting).pop(session, None) is not None:
            self._began_s = now_s

    def begin_reading(self) -> None:
        """Begin a pass over prompts."""
        self._read_until_s = math.inf

    def end_reading(self, now_s: float) -> None:
        """End the pass over prompts."""
        self._read_until_s = now_s

    @property
    def is_busy(self) -> bool:
        """Whether the target has a pass to do."""
        return bool(self._running or self._waiting)

    def was_busy_since(self, moment_s: float) -> bool:
        """Whether the target has had a pass to do, or read prompts, at any time since a moment on the actors' clock."""
        return self.is_busy or max(self._began_s, self._read_until_s) > moment_s

    def others_s(self, session: int) -> float:
        """Seconds of other sessions' passes after the session's own one, >= 0, and of a running pass's next rounds."""
        waiting = [num_tokens for other, num_tokens in self._waiting.items() if other != session]
        if session in self._running:
            return self._passes_s(waiting)
        # The first of the waiting rounds share the session's pass.
        return self._passes_s(waiting[self.max_batch - 1 :]) + self._passes_s(self._running.values())

    def remaining_s(self, now_s: float, num_tokens: int = 0) -> float:
        """Seconds until every pass in the queue is done, >= 0, and one more round of `num_tokens`, if any."""
        running_s = max(0.0, self._began_s + self._passes_s(self._running.values()) - now_s)
        joining = (num_tokens,) if num_tokens else ()
        return running_s + self._passes_s((*self._waiting.values(), *joining))

    def _passes_s(self, num_tokens: Iterable[int]) -> float:
        left, total_s = list(num_tokens), 0.0
        while left:
            shared, left = left[: self.max_batch], left[self.max_batch :]
            total_s += self.seconds(len(shared) * max(shared))
        return total_s
