"""The states of a session's drafter, derived from the instants of a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from protocol.trace import Instant

DrafterState = Literal["drafting", "resting", "overdue", "left"]

# The state that an instant of each kind begins; other kinds change nothing. A drafter that was overdue with the prompt
# is back with its first proposal.
_STATES: Mapping[str, DrafterState] = {
    "proposal": "drafting",
    "rejoin": "drafting",
    "rest": "resting",
    "overdue": "overdue",
    "withdraw": "left",
}


def drafter_state(before: DrafterState | None, instant: Instant) -> DrafterState | None:
    """The drafter's state after an instant; None until its first instant."""
    return _STATES.get(instant.kind, before)


def periods_away(instants: Sequence[Instant], ended: float) -> list[tuple[float, float, DrafterState]]:
    """The periods in which the drafter left a session to the target: begin, end, and the drafter's state.

    Times are in seconds on the clock of the session's instants, which are in order.
    """
    changes: list[tuple[float, DrafterState | None]] = []
    state: DrafterState | None = None
    for instant in instants:
        if (after := drafter_state(state, instant)) != state:
            state = after
            changes.append((instant.at, state))
    ends = [at for at, _ in changes[1:]] + [ended]
    return [
        (began, end, state)
        for (began, state), end in zip(changes, ends, strict=False)
        if state is not None and state != "drafting"
    ]
