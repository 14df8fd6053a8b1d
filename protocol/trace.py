"""Trace events: what the actors did and when, as typed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs

from protocol.reprs import brief

if TYPE_CHECKING:
    # Not at run time: this imports MLX, and the command line must not wait for that before it reports an error.
    from protocol.session_state import Commit

ActorName = Literal["target", "draft"]
SpanKind = Literal["load", "warm-up", "probe", "open", "prefill", "draft", "verify", "decode", "close", "save"]
InstantKind = Literal[
    "open", "proposal", "verdict", "hit", "miss", "rewind", "rest", "overdue", "rejoin", "withdraw", "finish", "cancel"
]


@attrs.frozen
class Share:
    """One session's part in a pass that several share: how many of its tokens go through the model."""

    session: int
    round: int
    num_tokens: int


@attrs.frozen
class Span:
    """The time that an actor's worker spent on one job.

    Attributes:
        session: which session it was for; None for a job that is not for one session.
        began, ended: seconds on the runtime's clock.
        num_tokens: tokens that went through the model.
        round: the session's round when the job was handed to the worker; None for a job outside rounds. A "prefill"
            with a round reads the rest of the prompt and gives the first token.
        shares: the sessions that shared the job; empty for a job of one session or of none.
    """

    actor: ActorName
    kind: SpanKind
    session: int | None
    began: float
    ended: float
    num_tokens: int = 0
    round: int | None = None
    shares: tuple[Share, ...] = ()

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions that the job was for; empty for a job of none."""
        if self.shares:
            return tuple([share.session for share in self.shares])
        return () if self.session is None else (self.session,)

    @property
    def begins_text(self) -> bool:
        """Whether it has read the rest of a prompt and given the first token."""
        return self.kind == "prefill" and self.round is not None

    @property
    def num_read(self) -> int:
        """Tokens that it has read without logits, if it is of a prompt."""
        return self.num_tokens - self.begins_text

    @property
    def gives_tokens(self) -> bool:
        """Whether it is a pass of the target that has given tokens."""
        return self.kind in ("verify", "decode") or self.begins_text

    def round_of(self, session: int) -> int | None:
        """The round of one of `sessions`; None for a job outside rounds."""
        return next((share.round for share in self.shares if share.session == session), self.round)

    @property
    def fractions(self) -> dict[int, float]:
        """The fraction of the job that each of `sessions` accounts for, in (0, 1]: its tokens, of those of all."""
        if not self.shares:
            return {} if self.session is None else {self.session: 1.0}
        num_tokens = sum([share.num_tokens for share in self.shares])
        if num_tokens == 0:
            return dict.fromkeys(self.sessions, 1.0 / len(self.shares))
        return {share.session: share.num_tokens / num_tokens for share in self.shares}


@attrs.frozen
class Instant:
    """A decision of an actor.

    Attributes:
        at: seconds on the runtime's clock.
        num_tokens: tokens proposed, accepted, rewound or drafted, depending on the kind.
        tokens: ids: the prompt of an "open", what a "proposal" proposes; empty for every other kind.
        commit: what a "verdict" committed; None for every other kind.
    """

    actor: ActorName
    kind: InstantKind
    session: int
    at: float
    round: int = 0
    num_tokens: int = 0
    tokens: tuple[int, ...] = ()
    commit: Commit | None = None

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("actor", "kind", "session", "at", "round", "num_tokens")}
        return brief("Instant", shown | ({"tokens": self.tokens} if self.tokens else {}))


Event = Span | Instant


@attrs.define(eq=False)
class Events:
    """Announces every event of a runtime to its listeners, in trio's thread."""

    _listeners: list[Callable[[Event], None]] = attrs.field(init=False, factory=list)
    # Whether anybody listens to instants. They are not made otherwise: there are several a token.
    wants_instants: bool = attrs.field(init=False, default=False)

    def listen(self, listener: Callable[[Event], None], *, only_spans: bool = False) -> None:
        """Have a function called with each event from now on, or at least with each span."""
        self._listeners.append(listener)
        self.wants_instants = self.wants_instants or not only_spans

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
