"""Places at the models: so many sessions are at work, and the others wait for their turn."""

from __future__ import annotations

from collections.abc import Callable

from actors.session import Session


class StreamAdmission:
    """Lets sessions begin, at once where there is a place, else in the order in which they came.

    A session has its place until both actors have put away what they had of it: what is bounded is the work of the
    models and the memory for caches. What a slow consumer has still to read of a text that is over takes no place.
    """

    def __init__(self, most: int | None, begin: Callable[[Session], None], can_begin: Callable[[], bool]) -> None:
        """All free.

        Args:
            most: places, >= 1; None for no bound.
            begin: hands a session to the actors; never waits.
            can_begin: whether the actors still take sessions.
        """
        self._most = most
        self._can_begin = can_begin
        self._begin = begin
        self._num_taken = 0
        self._waiting: dict[int, Session] = {}

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for a place."""
        return sum(not session.is_unwanted for session in list(self._waiting.values()))

    def enter(self, session: Session) -> None:
        """Have a session begin as soon as there is a place."""
        if self._most is None or self._num_taken < self._most:
            self._take(session)
        else:
            self._waiting[session.opened.session] = session

    def give_up(self, id: int) -> None:
        """Forget a session that waits; harmless where it does not."""
        self._waiting.pop(id, None)

    def _take(self, session: Session) -> None:
        self._num_taken += 1
        session.on_left = self._leave
        self._begin(session)

    def _leave(self) -> None:
        self._num_taken -= 1
        # Where the actors are being cancelled, what waits is about to be told that the runtime is closed.
        if self._waiting and self._can_begin():
            self._take(self._waiting.pop(next(iter(self._waiting))))
