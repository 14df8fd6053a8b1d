"""What the drafters have in common, with a model or without: how one leaves a session to the target."""

from __future__ import annotations

import logging
from typing import TypeVar

import trio

from actors.actor import Actor, ActorSession
from protocol.messages import Message, Withdraw
from protocol.session_state import SessionPhase

logger = logging.getLogger("outrider")

S = TypeVar("S", bound=ActorSession)


class Drafter(Actor[S]):
    """An actor without which a session goes on, only slower."""

    _target: trio.MemorySendChannel[Message]

    def _fail(self, part: S, error: Exception) -> None:
        """Leave a session to the target because of an error; it costs speed, never text."""
        logger.warning("drafting failed, session %d goes on without: %s", part.id, error, exc_info=error)
        part.session.counts.draft_failures += 1
        self._withdraw(part)

    def _withdraw(self, part: S) -> None:
        """Leave a session to the target, which is faster alone than with empty proposals."""
        self._note(part, "withdraw")
        part.state.withdraw(Withdraw(part.id))
        self._target.send_nowait(Withdraw(part.id))

    def withdraw_from_all(self) -> None:
        """Leave every session to the target. Never waits."""
        for part in list(self._parts.values()):
            if part.state.phase is not SessionPhase.CLOSED:
                self._withdraw(part)
