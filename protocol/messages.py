"""What the two actors and the runtime say to each other.

Every message names its session. Those of a round also name the round and the absolute position they
start from, so that whoever receives one can tell by looking whether it is still wanted.

A session, seen from outside (drafter on the left, target on the right):

    Open      ─────────────────>  both, from the runtime
    Proposal  ─────────────────>  "for round r, from position s, I propose these"
    Verdict   <─────────────────  "of those I accepted n, and this token comes next"
      … one proposal and one verdict a round, in turn …
    Ready     ─────────────────>  "I have read the text: you can wait for my proposals"
    Due       <─────────────────  "round r cannot wait: propose what you have", which may be nothing
    Overdue   <─────────────────  "until round r I go alone", as long as the drafter, which reads what is committed
                                  meanwhile, has not said Ready again
    Rest      ─────────────────>  "until round r, go alone": where speculating does not pay at present
    Withdraw  ─────────────────>  "I draft no more for this session" (a failure, or nothing to offer)
    Close     ─────────────────>  both, from the runtime
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
from attrs.validators import ge, lt, optional

from protocol.reprs import shown
from protocol.settings import Settings
from protocol.stop_strings import Stop


def _tokens(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(t, int) and t >= 0 for t in value):
        raise ValueError(f"{attribute.name} must be a tuple of token ids >= 0, got {shown(value)}")


@attrs.frozen
class Open:
    """A session begins.

    Attributes:
        session: unique within a runtime.
        prompt: token ids, at least one.
        settings: of the generation.
        seed: of the session's randomness, in [0, 2**64): the user's, or fresh entropy.
        stop_tokens: ids that end the text; empty under `ignore_eos`.
        context_length: positions that the target can take, or None where it names no bound.
        drafted: whether a drafter takes part.
        num_resumed: how many of the prompt's last tokens were generated before, by the session that this one resumes.
            They count towards `max_tokens`, and processors and random numbers see them as generated.
    """

    session: int = attrs.field(validator=ge(0))
    prompt: tuple[int, ...] = attrs.field(validator=_tokens)
    settings: Settings
    seed: int = attrs.field(validator=[ge(0), lt(2**64)])
    stop_tokens: frozenset[int]
    context_length: int | None = attrs.field(default=None, validator=optional(ge(1)))
    drafted: bool = True
    num_resumed: int = attrs.field(default=0, validator=ge(0))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt that were not generated."""
        return len(self.prompt) - self.num_resumed

    @prompt.validator
    def _not_empty(self, _: Any, value: tuple[int, ...]) -> None:
        if not value:
            raise ValueError("a session needs a prompt of at least one token")


@attrs.frozen
class Proposal:
    """The drafter's guess at what comes next.

    Attributes:
        session, round: what it belongs to.
        start: absolute position of the first drafted token, or of the token after the text where
            nothing is proposed.
        tokens: drafted ids; may be empty, which asks the target to decode one token by itself.
        probs: the distributions that the tokens were drawn from, one (W,) array each, evaluated, or None for a
            token that was no draw, and had to be this one after the text before it; empty under the match
            rule, which needs none.
    """

    session: int = attrs.field(validator=ge(0))
    round: int = attrs.field(validator=ge(0))
    start: int = attrs.field(validator=ge(1))
    tokens: tuple[int, ...] = attrs.field(validator=_tokens)
    probs: tuple[mx.array | None, ...] = attrs.field(default=(), eq=False, repr=False)

    @probs.validator
    def _one_each(self, _: Any, value: tuple[mx.array | None, ...]) -> None:
        if value and len(value) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens need as many distributions, got {len(value)}")


@attrs.frozen
class Likelihood:
    """How likely the target found a token, by its log-probabilities after logits processors.

    Attributes:
        logprob: of the token, <= 0.
        top: (id, log-probability) of the likeliest tokens at its position, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@attrs.frozen
class Verdict:
    """The target's answer to a proposal.

    Attributes:
        session, round, start: as in the proposal that it answers.
        num_accepted: drafted tokens that stand.
        token: the one after them: recovered, bonus, or the target's own where nothing was proposed.
            None where the forward pass had no row for it (the N=1 fallback), which needs
            num_accepted >= 1, since every round commits something.
        single_step: whether only committed tokens were fed, and only the first drafted one compared: because
            nothing could have been undone (the N=1 fallback), or to settle what is to be fed again.
        settles: whether it was the latter.
        likelihoods: of the accepted tokens and the one after them, where the session asks for log-probabilities.
        stop: where a stop string ends the text in this round, or None. Only the target reads text as it comes.
    """

    session: int = attrs.field(validator=ge(0))
    round: int = attrs.field(validator=ge(0))
    start: int = attrs.field(validator=ge(1))
    num_accepted: int = attrs.field(validator=ge(0))
    token: int | None = attrs.field(validator=optional(ge(0)))
    single_step: bool = attrs.field(default=False)
    settles: bool = False
    likelihoods: tuple[Likelihood, ...] = ()
    stop: Stop | None = None

    @token.validator
    def _commits_something(self, _: Any, value: int | None) -> None:
        if value is None and self.num_accepted == 0:
            raise ValueError("a verdict commits at least one token")

    @single_step.validator
    def _compares_one(self, _: Any, value: bool) -> None:
        if value and self.num_accepted > 1:
            raise ValueError(f"a single step compares one drafted token, and cannot accept {self.num_accepted}")


@attrs.frozen
class Rest:
    """The drafter proposes nothing for a while, and the target decodes by itself, which is faster so.

    Attributes:
        session: what it belongs to.
        until: the first round for which a proposal is made again. A rest may be prolonged while it lasts; said too
            late, that is another rest.
    """

    session: int = attrs.field(validator=ge(0))
    until: int = attrs.field(validator=ge(1))


@attrs.frozen
class Ready:
    """The drafter has read the text, but for the last few tokens, and drafts from now on.

    Until then, and after an `Overdue`, the target does not wait for proposals longer than a moment.
    """

    session: int = attrs.field(validator=ge(0))


@attrs.frozen
class Due:
    """The target waits no longer for the proposal of a round.

    The drafter answers at once, in the event loop and not on its thread, with the tokens that it has drawn by now. So
    whether a token is proposed depends on when it was drawn, and not on which token it is: otherwise the rejection rule
    would not be exact. (A token that ends a text ends a chain, too, and makes a proposal that is ready earlier.)

    Attributes:
        session, round: what it belongs to.
    """

    session: int = attrs.field(validator=ge(0))
    round: int = attrs.field(validator=ge(0))


@attrs.frozen
class Overdue:
    """The target decodes by itself for a while, since the drafter was late or has not read the prompt yet.

    It is said right behind the verdict of a round, or before the drafter has drawn anything. What the drafter may have
    drawn for the rounds until then is not proposed, whichever tokens those are.

    Attributes:
        session: what it belongs to.
        until: the first round for which a proposal is expected again. It is said anew, before that round begins, as
            long as the drafter is not `Ready`.
    """

    session: int = attrs.field(validator=ge(0))
    until: int = attrs.field(validator=ge(1))


@attrs.frozen
class Withdraw:
    """The drafter takes no further part in a session."""

    session: int = attrs.field(validator=ge(0))


@attrs.frozen
class Close:
    """A session is over: its text ended, or nobody wants it any more."""

    session: int = attrs.field(validator=ge(0))


Message = Open | Proposal | Ready | Due | Overdue | Rest | Verdict | Withdraw | Close
