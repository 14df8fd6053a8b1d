"""What the drafter of a session does, by the instants of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from protocol.trace import Instant

DrafterState = Literal["drafting", "resting", "overdue", "left"]

# What the drafter does from an instant on, by the kind of the instant; other kinds change nothing. One that was overdue
# with the prompt is back with its first proposal.
_STATES: Mapping[str, DrafterState] = {
    "proposal": "drafting",
    "rejoin": "drafting",
    "rest": "resting",
    "overdue": "overdue",
    "withdraw": "left",
}


def drafter_state(before: DrafterState | None, instant: Instant) -> DrafterState | None:
    """What the drafter does after an instant; None before it has done anything."""
    return _STATES.get(instant.kind, before)


def spells_away(instants: Sequence[Instant], end: float) -> list[tuple[float, float, DrafterState]]:
    """The times in which the drafter left a session to the target: from, to, and its state there.

    Args:
        instants: of the session, in order.
        end: of the session; times are in seconds on the clock of the instants.
    """
    changes: list[tuple[float, DrafterState | None]] = []
    state: DrafterState | None = None
    for instant in instants:
        if (after := drafter_state(state, instant)) != state:
            state = after
            changes.append((instant.at, state))
    ends = [at for at, _ in changes[1:]] + [end]
    return [
        (began, ended, state)
        for (began, state), ended in zip(changes, ends, strict=False)
        if state is not None and state != "drafting"
    ]
