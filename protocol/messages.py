"""The messages that the two actors and the runtime send to each other.

Every message names its session. A message of a round also names the round and the absolute position that it starts
from, so that the receiver can tell whether it is still wanted.

The messages of one session (drafter on the left, target on the right):

    Open      ─────────────────>  to both, from the runtime
    Prompt-   <─────────────────  "these are my hidden states of the prompt", for a drafter that reads them; verdicts
    Features                      carry those of later tokens
    Ready     ─────────────────>  "I have read the text: you can wait for my proposals"
    Proposal  ─────────────────>  "for round r, from position s, I propose these tokens"
    Verdict   <─────────────────  "I accepted n of them, and this token comes next"
      … one proposal and one verdict a round …
    Due       <─────────────────  "I stop waiting in round r: propose what you have", possibly nothing
    Overdue   <─────────────────  "until round r I decode alone", repeated until the drafter is Ready again
    Rested    <─────────────────  "in the rest I have committed these tokens", instead of a verdict for each round
    Rest      ─────────────────>  "until round r, decode alone", where speculating does not pay at present
    Withdraw  ─────────────────>  "I draft no more for this session": it failed, or has nothing to offer; all that it
                                  had drawn has been proposed or dropped by then
    Close     ─────────────────>  to both, from the runtime
"""

from __future__ import annotations

from typing import Any

import attrs
import mlx.core as mx
from attrs.validators import ge, lt, optional

from protocol.copying import DraftedBy
from protocol.reprs import shown
from protocol.settings import Settings
from protocol.stop_strings import Stop


def _tokens(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(t, int) and t >= 0 for t in value):
        raise ValueError(f"{attribute.name} must be a tuple of token ids >= 0, got {shown(value)}")


def _check_place(session: int, round: int, start: int) -> None:
    # In one call and not by validators, since this runs for every token.
    if session < 0 or round < 0 or start < 1:
        raise ValueError(f"session and round must be >= 0 and start >= 1, got {session}, {round} and {start}")


@attrs.frozen
class Open:
    """A session begins.

    Attributes:
        session: unique within a runtime.
        prompt: token ids, at least one.
        settings: of the generation.
        seed: of the session's randomness, in [0, 2**64): from the user's, or fresh entropy.
        stop_tokens: ids that end the text; empty under `ignore_eos`.
        context_length: positions that the target can take; None if it names no bound.
        drafted: whether a drafter takes part.
        target_begins: whether the first round is the target's, as if the drafter rested: a drafter that reads hidden
            states has none before that. So what is drawn under the rejection rule does not depend on how the prompt is
            read.
        num_scored: how many of the prompt's last tokens are scored; then nothing is generated.
        message_starts: lengths of the prompt before some of its messages, where another prompt is likely to part.
        only_reads: whether the prompt is read, for the prefix cache, and nothing is generated.
    """

    session: int = attrs.field(validator=ge(0))
    prompt: tuple[int, ...] = attrs.field(validator=_tokens)
    settings: Settings
    seed: int = attrs.field(validator=[ge(0), lt(2**64)])
    stop_tokens: frozenset[int]
    context_length: int | None = attrs.field(default=None, validator=optional(ge(1)))
    drafted: bool = True
    target_begins: bool = False
    num_scored: int = attrs.field(default=0, validator=ge(0))
    message_starts: tuple[int, ...] = ()
    only_reads: bool = False

    @property
    def num_read(self) -> int:
        """Tokens of the prompt that are read without logits; the one after them is the first whose logits are used."""
        return len(self.prompt) - self.num_scored - 1

    @prompt.validator
    def _not_empty(self, _: Any, value: tuple[int, ...]) -> None:
        if not value:
            raise ValueError("a session needs a prompt of at least one token")


@attrs.frozen
class Sparse:
    """A distribution with few tokens, evaluated; the others have probability 0.

    Attributes:
        size: the width of the vocabulary.
        tokens: (k,) ids in uint32, each at most once.
        values: (k,) their probabilities in float32; >= 0.
    """

    size: int
    tokens: mx.array = attrs.field(eq=False, repr=False)
    values: mx.array = attrs.field(eq=False, repr=False)


Distribution = mx.array | Sparse


@attrs.frozen
class Proposal:
    """The drafter's guess at what comes next.

    Attributes:
        start: absolute position of the first drafted token; if nothing is proposed, of the token after the text.
        tokens: drafted ids; if empty, the target decodes one token by itself.
        probs: for each token the distribution that it was drawn from: a (W,) array, evaluated, or a `Sparse` one; or
            None for a token that the text before it determined. Empty under the match rule, which needs none.
        reach: for each token the probability that it and all before it are accepted, in [0, 1]. The target may leave
            out tokens from the end that are not worth their time. Empty if it must not.
        num_stale: how many of the tokens, from the front, were drafted without hidden states of the target that have
            come since; see `LookaheadTree.is_stale`.
        drafters: for each token who drafted it; empty if the model drafted all.
    """

    session: int
    round: int
    start: int
    tokens: tuple[int, ...]
    probs: tuple[Distribution | None, ...] = attrs.field(default=(), eq=False, repr=False)
    reach: tuple[float, ...] = attrs.field(default=(), repr=False)
    num_stale: int = 0
    drafters: tuple[DraftedBy, ...] = ()

    def __attrs_post_init__(self) -> None:
        _check_place(self.session, self.round, self.start)
        _tokens(self, attrs.fields(Proposal).tokens, self.tokens)
        for name in ("drafters", "probs", "reach"):
            values = getattr(self, name)
            if values and len(values) != len(self.tokens):
                raise ValueError(f"{name} must have {len(self.tokens)} values, one for each token, got {len(values)}")
        if not 0 <= self.num_stale <= len(self.tokens):
            raise ValueError(f"of {len(self.tokens)} tokens, {self.num_stale} cannot be stale")

    @property
    def needs_no_model(self) -> bool:
        """Whether there are tokens, and no model has drafted any of them."""
        return bool(self.drafters) and "model" not in self.drafters

    def cut(self, num_tokens: int) -> Proposal:
        """The first tokens of the proposal."""
        names = "tokens", "probs", "reach", "drafters"
        values: dict[str, Any] = {name: getattr(self, name)[:num_tokens] for name in names}
        return attrs.evolve(self, num_stale=min(self.num_stale, num_tokens), **values)


@attrs.frozen
class Likelihood:
    """How likely a token was under the target, after the logits processors.

    Attributes:
        logprob: of the token, <= 0.
        top: (id, log-probability) of the likeliest tokens at its position, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@attrs.frozen
class Features:
    """Hidden states of the target, for a drafter that was trained to read them.

    Attributes:
        start: position of the first token.
        values: (tokens, width), evaluated.
    """

    start: int
    values: mx.array


@attrs.frozen
class Verdict:
    """The target's answer to a proposal.

    Attributes:
        session, round, start: as in the proposal that it answers.
        num_accepted: drafted tokens that were accepted.
        token: the token after them: recovered, bonus, or the target's own if nothing was proposed. None if the forward
            pass had no row for it (the N=1 fallback); then num_accepted >= 1, since every round commits something.
        single_step, settles: whether the target fed only committed tokens and compared only the first drafted one: its
            cache cannot undo anything (the N=1 fallback), or, if `settles`, it settled tokens (`ReplayDebt`).
        num_judged: how many of the drafted tokens, from the front, were judged (see `Proposal.reach`); None for all.
        likelihoods: of the accepted tokens and the one after them, if the session asks for log-probabilities.
        stop: where a stop string ends the text in this round, or None. Only the target decodes text as it is committed.
        features: of the tokens that the target has read since the last ones, if the drafter reads features; else None.
    """

    session: int
    round: int
    start: int
    num_accepted: int
    token: int | None
    single_step: bool = False
    settles: bool = False
    likelihoods: tuple[Likelihood, ...] = ()
    stop: Stop | None = None
    num_judged: int | None = None
    features: Features | None = attrs.field(default=None, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_place(self.session, self.round, self.start)
        if self.num_accepted < 0 or (self.token is not None and self.token < 0):
            raise ValueError(f"neither a number of tokens nor a token is negative: {self!r}")
        if self.token is None and self.num_accepted == 0:
            raise ValueError("a verdict commits at least one token")
        if self.num_judged is not None and self.num_judged < self.num_accepted:
            raise ValueError(f"a verdict on {self.num_judged} drafted tokens cannot accept {self.num_accepted}")
        if self.single_step and self.num_accepted > 1:
            raise ValueError(f"a single step compares one drafted token, and cannot accept {self.num_accepted}")


@attrs.frozen
class Rest:
    """The drafter proposes nothing for some rounds, because the target is faster alone.

    Attributes:
        until: the first round for which the drafter proposes again. A second Rest prolongs the first one, or is a rest
            of its own if the first one is over.
    """

    session: int = attrs.field(validator=ge(0))
    until: int = attrs.field(validator=ge(1))


@attrs.frozen
class Rested:
    """What the target has committed in some rounds of a rest: one message, instead of a verdict for each round.

    Attributes:
        round: the last of these rounds; the first is the next one that was not reported to the drafter yet.
        start: absolute position of the first token.
        tokens: at least one a round.
    """

    session: int
    round: int
    start: int
    tokens: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        _check_place(self.session, self.round, self.start)
        _tokens(self, attrs.fields(Rested).tokens, self.tokens)


TELL_BEFORE_END = 3  # the target sends `Rested` once this many rounds of a rest are left, and then after each round


@attrs.frozen
class Ready:
    """The drafter has read the text, except for the last few tokens, and drafts from now on.

    Before this message, and after an `Overdue`, the target does not wait for proposals longer than a moment.
    """

    session: int = attrs.field(validator=ge(0))


@attrs.frozen
class Due:
    """The target waits no longer for the proposal of a round: it took too long, or a pass with other texts begins.

    The drafter answers at once, in the event loop, with the tokens that it has drawn so far. So whether a token is
    proposed depends on when it was drawn, not on which token it is; otherwise the rejection rule would not be exact.
    (A token that ends the text also ends the chain, so its proposal is ready earlier.)

    Attributes:
        is_late: whether the drafter has taken too long. If so, the target decodes alone until the next `Ready`.
    """

    session: int = attrs.field(validator=ge(0))
    round: int = attrs.field(validator=ge(0))
    is_late: bool = True


@attrs.frozen
class Overdue:
    """The target decodes alone for some rounds, because the drafter was late or has not read the prompt yet, or because
    the pass over its proposal has failed.

    It is sent before the drafter has drawn anything, or directly after a round for which a late drafter had no drawn
    tokens left to propose. As long as it has some, it may be late because of which tokens it drew. It is also sent
    instead of a verdict, when a pass with drafted tokens has failed.

    Attributes:
        until: the first round for which a proposal is expected again. Before that round begins, the target repeats the
            message if the drafter is not `Ready`.
    """

    session: int = attrs.field(validator=ge(0))
    until: int = attrs.field(validator=ge(1))


@attrs.frozen
class Withdraw:
    """The drafter takes no further part in a session. See `protocol.lookahead_tree.withdrawal`."""

    session: int = attrs.field(validator=ge(0))


@attrs.frozen
class PromptFeatures:
    """The target has read the prompt, and gives the drafter the features of its tokens.

    Attributes:
        features: None if the target had cached the whole prompt, so that it has none.
    """

    session: int = attrs.field(validator=ge(0))
    features: Features | None = attrs.field(eq=False, repr=False)


@attrs.frozen
class Close:
    """A session is over: its text has ended, or its consumer has left."""

    session: int = attrs.field(validator=ge(0))


Message = Open | PromptFeatures | Proposal | Ready | Due | Overdue | Rest | Rested | Verdict | Withdraw | Close
