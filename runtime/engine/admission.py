"""Admission of streams: a bounded number of sessions is at work, and the others wait in order."""

from __future__ import annotations

from collections.abc import Callable

from actors.session import Session


class StreamAdmission:
    """A queue in front of the actors: admits a session at once if there is room, else in the order of arrival.

    A session counts as admitted until both actors have released it, caches included: the bound is on the models' work
    and on the memory for caches. A finished text that a slow consumer has not read yet does not count.

    Attributes:
        max_sessions: most sessions at a time; None for no bound.
    """

    def __init__(
        self, max_sessions: int | None, begin: Callable[[Session], None], can_begin: Callable[[], bool]
    ) -> None:
        """No session is admitted yet.

        Args:
            max_sessions: most sessions at a time, >= 1; None for no bound.
            begin: hands a session to the actors; never waits.
            can_begin: whether the actors still take sessions.
        """
        self.max_sessions = max_sessions
        self._can_begin = can_begin
        self._begin = begin
        self._num_admitted = 0
        self._waiting: dict[int, Session] = {}

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for admission."""
        return sum(not session.is_unwanted for session in list(self._waiting.values()))

    def enter(self, session: Session) -> None:
        """Begin a session as soon as there is room."""
        if self.max_sessions is None or self._num_admitted < self.max_sessions:
            self._admit(session)
        else:
            self._waiting[session.opened.session] = session

    def give_up(self, id: int) -> None:
        """Forget a session that waits; does nothing for any other."""
        self._waiting.pop(id, None)

    def _admit(self, session: Session) -> None:
        self._num_admitted += 1
        session.on_left = self._leave
        self._begin(session)

    def _leave(self) -> None:
        self._num_admitted -= 1
        # If the actors are being cancelled, waiting sessions are about to end with RuntimeClosedError.
        if self._waiting and self._can_begin():
            self._admit(self._waiting.pop(next(iter(self._waiting))))
