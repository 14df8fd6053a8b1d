"""What happened, when, as typed values; who draws or writes them is not decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from protocol.reprs import brief

if TYPE_CHECKING:
    # Not at run time: it would bring in MLX, which a mistake on the command line need not wait for.
    from protocol.session_state import Commit

Actor = Literal["target", "draft"]
SpanKind = Literal["load", "warm-up", "probe", "open", "prefill", "draft", "verify", "decode", "close", "save"]
InstantKind = Literal[
    "open",
    "proposal",
    "verdict",
    "hit",
    "miss",
    "rewind",
    "rest",
    "overdue",
    "rejoin",
    "withdraw",
    "finish",
    "cancel",
]


@attrs.frozen
class Span:
    """Time that an actor's worker spent on one job.

    Attributes:
        actor: whose worker.
        kind: what the job was.
        session: which session it was for, or None for one that is for all.
        began, ended: seconds on the runtime's clock.
        num_tokens: tokens that went through the model, 0 where none did.
        round: of the session, which was under way when the job was handed in; None for a job of no round.
    """

    actor: Actor
    kind: SpanKind
    session: int | None
    began: float
    ended: float
    num_tokens: int = 0
    round: int | None = None


@attrs.frozen
class Instant:
    """A decision of an actor.

    Attributes:
        actor, session: whose, for which session.
        kind: what was decided.
        at: seconds on the runtime's clock.
        round: of the session.
        num_tokens: tokens proposed, accepted, rewound or drafted for, as the kind has it.
        tokens: ids: the prompt of an "open", what a "proposal" proposes; empty for every other kind.
        commit: what a "verdict" committed; None for every other kind.
    """

    actor: Actor
    kind: InstantKind
    session: int
    at: float
    round: int = 0
    num_tokens: int = 0
    tokens: tuple[int, ...] = ()
    commit: Commit | None = None

    def __repr__(self) -> str:
        told = {name: getattr(self, name) for name in ("actor", "kind", "session", "at", "round", "num_tokens")}
        return brief("Instant", told | ({"tokens": self.tokens} if self.tokens else {}))


Event = Span | Instant
