"""The acceptance rules: how many tokens of a proposal are accepted, and which token comes next.

*p* is the target's distribution at a position, *q* the draft's, *d* the drafted token.

**match**: *d* is accepted if it is the target's choice: at temperature 0 the argmax; above 0, `argmax(log p + g)`,
where the Gumbel noise g is the same for target and draft, and depends on (seed, position) alone (Daliri, Musco and
Suresh 2024, arXiv 2408.07978). So the text does not depend on the drafter, and similar distributions choose the same
token with probability at least (1 - TV) / (1 + TV). A user's sampler may make the choice instead.

**rejection** (Leviathan, Kalman and Matias 2023, arXiv 2211.17192, algorithm 1): *d* is accepted with probability
min(1, p(d)/q(d)). At the first rejection a token is *recovered* from the residual max(0, p - q), normalised; after a
full acceptance a *bonus* token is drawn from p. Exact whatever q is, if d was really drawn from q.

Logits come here after processors and filters, which remove a token by -inf, and before the temperature. A judgement is
lazy, so that those of all texts of a pass are evaluated together, in one synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, islice
from typing import Literal, cast

import attrs
import mlx.core as mx

from protocol.errors import ProtocolError
from protocol.messages import Distribution, Likelihood, Sparse
from protocol.randomness import Purpose, keys_for

Rule = Literal["match", "rejection"]

# (seed, absolute position) of each row of some logits, which may be of several texts.
Decisions = Sequence[tuple[int, int]]


@attrs.frozen
class Judgement:
    """The target's decision about one proposal."""

    num_accepted: int  # drafted tokens that are accepted
    # The token after them: recovered or bonus. None if all are accepted and there was no row for a bonus (N=1
    # fallback).
    token: int | None


@attrs.frozen
class ProposedRows:
    """A proposal to judge, and how many rows of logits there are for it."""

    seed: int  # of the session, in [0, 2**64)
    start: int  # absolute position of the first drafted token
    num_rows: int  # k + 1, for each drafted position and the one after; or k if the pass had no row for a bonus token
    drafted: tuple[int, ...] = ()  # (k,) drafted tokens
    # Unless the rule is match, what each token was drawn from: (W,) with W <= V, entries beyond W being zero, or a
    # `Sparse` one; or None for a token that the text before it determined (q is 1 there).
    draft_probs: tuple[Distribution | None, ...] = ()

    def check(self, rule: Rule) -> None:
        """Raises: ProtocolError: the numbers of rows, tokens and distributions do not agree."""
        num_drafted = len(self.drafted)
        if self.num_rows not in (num_drafted, num_drafted + 1) or self.num_rows == 0:
            raise ProtocolError(
                f"{num_drafted} drafted tokens need {num_drafted} or {num_drafted + 1} rows of logits, at least one, "
                f"got {self.num_rows}"
            )
        if rule != "match" and len(self.draft_probs) != num_drafted:
            raise ProtocolError(f"{num_drafted} drafted tokens need as many distributions, got {len(self.draft_probs)}")

    @property
    def decisions(self) -> list[tuple[int, int]]:
        """(seed, position) of each row."""
        return [(self.seed, self.start + i) for i in range(self.num_rows)]


@attrs.frozen
class LazyJudgements:
    """The judgements of several texts, which may not be computed yet."""

    arrays: tuple[mx.array, ...]  # what `read` reads; with others they are evaluated in one synchronisation
    read: Callable[[], list[Judgement]]  # of each text; evaluates the arrays if that was not done yet

    @property
    def tokens(self) -> mx.array:
        """(n,) the next token of each text, if nothing was drafted for any."""
        return self.arrays[-1]


def judge(
    logits: mx.array,
    proposed: Sequence[ProposedRows],
    rule: Rule,
    temperature: float,
    *,
    chosen: mx.array | None = None,
) -> LazyJudgements:
    """Judge the proposals of several texts, as one set of array operations; each is judged as if it were alone.

    Args:
        logits: (R, V) the target's, of one text after the other.
        rule, temperature: of all texts; > 0 under the rejection rule.
        chosen: (R,) under the match rule, the target's choices, if a user's sampler has made them.

    Raises: ProtocolError: see `ProposedRows.check`.
    """
    for each in proposed:
        each.check(rule)
    if rule == "match":
        return _by_match(logits, proposed, temperature, chosen)
    return _by_drawing(logits, proposed, temperature)


@attrs.frozen
class LazyLikelihoods:
    """The log-probabilities of tokens, and of the likeliest tokens at their positions; may not be computed yet."""

    own: mx.array  # (m, 1) log-probabilities of the tokens
    ids: mx.array  # (m, n) the likeliest tokens, likeliest first
    best: mx.array  # their log-probabilities

    @classmethod
    def of(cls, logits: mx.array, tokens: mx.array, num_top: int) -> LazyLikelihoods:
        """Of tokens (m,) by logits (m, V) after processors, and of the `num_top` likeliest, >= 1, or of all V."""
        rows = logits.astype(mx.float32)
        total = mx.logsumexp(rows, axis=-1, keepdims=True)
        own = mx.take_along_axis(rows, tokens[:, None], axis=-1) - total
        named = mx.sort(_highest(rows, num_top), axis=-1)
        named_logprobs = mx.take_along_axis(rows, named, axis=-1) - total
        by_rank = mx.argsort(-named_logprobs, axis=-1)
        order = mx.take_along_axis(named, by_rank, axis=-1)
        return cls(own, order, mx.take_along_axis(named_logprobs, by_rank, axis=-1))

    def arrays(self) -> list[mx.array]:
        """All arrays, to be evaluated together with something else."""
        return [self.own, self.ids, self.best]

    def read(self) -> tuple[Likelihood, ...]:
        """One for each token. Evaluates the arrays if that was not done yet."""
        mx.eval(self.arrays())
        own = cast(list[list[float]], self.own.tolist())
        ids, best = cast(list[list[int]], self.ids.tolist()), cast(list[list[float]], self.best.tolist())
        return tuple(
            Likelihood(logprob, tuple(zip(row_ids, row_best, strict=True)))
            for (logprob,), row_ids, row_best in zip(own, ids, best, strict=True)
        )


def likelihoods(logits: mx.array, tokens: Sequence[int], num_top: int) -> tuple[Likelihood, ...]:
    """The likelihoods of known tokens (m,) by logits (n >= m, V); none if `num_top` is 0. Costs a synchronisation."""
    if not num_top or not tokens:
        return ()
    return LazyLikelihoods.of(logits[: len(tokens)], mx.array(tuple(tokens)), num_top).read()


def _highest(rows: mx.array, num: int) -> mx.array:
    """(n, num) ids of the highest entries of each row; of equal ones the lower ids. A sort takes five times as long."""
    width = rows.shape[-1]
    begin = max(0, width - num)
    lowest = mx.min(mx.take_along_axis(rows, mx.argpartition(rows, begin, axis=-1)[:, begin:], axis=-1), axis=-1)
    by_id = mx.where(rows == lowest[:, None], width - 1 - mx.arange(width), -1)
    return mx.argpartition(mx.where(rows > lowest[:, None], width, by_id), begin, axis=-1)[:, begin:]


# --- match ----------------------------------------------------------------------------------------


def scores(logits: mx.array, temperature: float, decisions: Decisions, noise_size: int) -> mx.array:
    """The scores whose argmax is the token that a model chooses by each row of logits (n, V) under the match rule:
    (n, V), lazy. At temperature 0 they are the logits.

    `noise_size` is the width at which noise is made, >= V. It must be the same for both models, because MLX's noise for
    one entry depends on the size of the array.
    """
    if temperature == 0:
        return logits
    noise = _gumbel(keys_for(Purpose.NOISE, decisions), noise_size)
    return _tempered(logits, temperature) + noise[:, : logits.shape[1]]


def _gumbel(keys: mx.array, size: int) -> mx.array:
    """(n, size) noise; each row is what its key alone gives."""
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)
    return noise


def choices_together(logits: mx.array, rule: Rule, temperature: float, decisions: Decisions) -> mx.array:
    """The tokens (n,) that texts choose by (n, V) logits, as if alone; bonus tokens under the rejection rule; lazy."""
    if rule == "match":
        return mx.argmax(scores(logits, temperature, decisions, logits.shape[1]), axis=-1)
    # As `draw`: the largest sum of log-probability and noise.
    noise = _gumbel(keys_for(Purpose.RECOVER, decisions), logits.shape[1])
    return mx.argmax(mx.log(distribution(logits, temperature)) + noise, axis=-1)


def likeliest(scores: mx.array) -> tuple[mx.array, mx.array]:
    """The best token of each row of scores (n, V), and its softmax probability; both (n,), lazy."""
    scores = scores.astype(mx.float32)
    best = mx.argmax(scores, axis=-1, keepdims=True)
    probs = mx.exp(mx.take_along_axis(scores, best, axis=-1) - mx.logsumexp(scores, axis=-1, keepdims=True))
    return best[:, 0], probs[:, 0]


def count_matches(chosen: list[int], drafted: tuple[int, ...]) -> int:
    """Length of the prefix of the drafted tokens (k,) that agrees with the target's choices, (k,) or (k + 1,)."""
    for i, (chosen_token, drafted_token) in enumerate(zip(chosen, drafted, strict=False)):
        if chosen_token != drafted_token:
            return i
    return len(drafted)


def _by_match(
    logits: mx.array, proposed: Sequence[ProposedRows], temperature: float, chosen: mx.array | None
) -> LazyJudgements:
    if chosen is None:
        decisions = [decision for each in proposed for decision in each.decisions] if temperature > 0 else []
        chosen = choices_together(logits, "match", temperature, decisions)
    if not any(each.drafted for each in proposed):
        return _undrafted(chosen)
    choice_of_rows = chosen

    def read() -> list[Judgement]:
        ids, judgements = iter(cast(list[int], choice_of_rows.tolist())), []
        for each in proposed:
            own = list(islice(ids, each.num_rows))
            num_accepted = count_matches(own, each.drafted)
            judgements.append(Judgement(num_accepted, own[num_accepted] if num_accepted < each.num_rows else None))
        return judgements

    return LazyJudgements((choice_of_rows,), read)


def _undrafted(chosen: mx.array) -> LazyJudgements:
    return LazyJudgements((chosen,), lambda: [Judgement(0, token) for token in cast(list[int], chosen.tolist())])


# --- rejection ------------------------------------------------------------------------------------


def distribution(logits: mx.array, temperature: float) -> mx.array:
    """Probabilities (…, V) in float32 of logits (…, V) at a temperature > 0; lazy."""
    return mx.softmax(_tempered(logits, temperature), axis=-1)


def draw(probs: mx.array, key: mx.array) -> mx.array:
    """One token id, drawn from probabilities (V,) that need not be normalised; lazy, shape ()."""
    return mx.random.categorical(mx.log(probs), key=key)


def likeliest_only(logits: mx.array, count: int) -> tuple[mx.array, mx.array | None]:
    """Logits (n, V) with -inf for all but the `count` >= 1 largest of each row, as a draft may be drawn from any.

    Returns: (n, V) logits and (n, count) ids in any order, None if these are all tokens; lazy.
    """
    if count >= logits.shape[-1]:
        return logits, None
    kept = mx.argpartition(-logits, kth=count - 1, axis=-1)[..., :count]
    nothing = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
    return mx.put_along_axis(nothing, kept, mx.take_along_axis(logits, kept, axis=-1), axis=-1), kept


def count_accepted(target_probs: mx.array, draft_probs: mx.array, uniforms: mx.array) -> mx.array:
    """Length of the accepted prefix of each of some proposals.

    Args:
        target_probs: (…, k) probability of each drafted token under the target.
        draft_probs: (…, k) likewise under the draft, as it was when the token was drawn; > 0.
        uniforms: (…, k) draws in [0, 1).

    Returns: (…) int in [0, k], lazy; k means that a bonus token is due.
    Source: Leviathan et al. 2023, arXiv 2211.17192, algorithm 1.
    """
    # Multiply, don't divide: a token to which the target gives zero stays rejected even when u == 0.
    accepted = uniforms * draft_probs < target_probs
    return mx.cumprod(accepted.astype(mx.int32), axis=-1).sum(axis=-1)


def residual(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """The residual distribution max(0, p - q), of recovered tokens, not normalised; p where it is 0; (…, V), lazy."""
    difference = mx.maximum(target_probs - draft_probs, 0)
    return mx.where(difference.sum(axis=-1, keepdims=True) > 0, difference, target_probs)


def _by_drawing(logits: mx.array, proposed: Sequence[ProposedRows], temperature: float) -> LazyJudgements:
    decisions = [decision for each in proposed for decision in each.decisions]
    longest = max(len(each.drafted) for each in proposed)
    if longest == 0:
        return _undrafted(choices_together(logits, "rejection", temperature, decisions))
    p = distribution(logits, temperature)
    begins = list(accumulate([each.num_rows for each in proposed], initial=0))[:-1]
    q = _draft_rows(proposed, begins, like=p)
    rows, drafted, exists = _padded(proposed, begins, longest)
    of_target, of_draft = p[rows, drafted], q[rows, drafted]
    # 0 where a text was filled up, or a processor left nothing to draw from. So no such token is accepted.
    was_drawn = exists & (of_draft > 0)
    of_target, of_draft = mx.where(was_drawn, of_target, 0.0), mx.where(was_drawn, of_draft, 0.0)
    places = [(each.seed, each.start + i) for each in proposed for i in range(longest)]
    uniforms: mx.array = mx.vmap(lambda key: mx.random.uniform(key=key))(keys_for(Purpose.ACCEPT, places))
    num_accepted = count_accepted(of_target, of_draft, uniforms.reshape(len(proposed), longest))
    # Only the device knows from which row the next token is drawn: reading that here would be a second synchronisation.
    row = mx.minimum(num_accepted, mx.array([each.num_rows - 1 for each in proposed])) + mx.array(begins)
    keys = keys_for(Purpose.RECOVER, decisions)[row]
    left = residual(p[row], q[row])
    # As `draw`: the largest sum of log-probability and noise.
    tokens = mx.argmax(mx.log(left) + _gumbel(keys, left.shape[1]), axis=-1)

    def read() -> list[Judgement]:
        counts, ids = cast(list[int], num_accepted.tolist()), cast(list[int], tokens.tolist())
        return [
            Judgement(count, token if count < each.num_rows else None)
            for count, token, each in zip(counts, ids, proposed, strict=True)
        ]

    return LazyJudgements((num_accepted, tokens), read)


def _padded(
    proposed: Sequence[ProposedRows], begins: Sequence[int], longest: int
) -> tuple[mx.array, mx.array, mx.array]:
    """(texts, longest) each, filled up: the row that judges a drafted token, the token, and whether it exists."""
    lengths = mx.array([len(each.drafted) for each in proposed])[:, None]
    exists = mx.arange(longest) < lengths
    rows = mx.array(list(begins))[:, None] + mx.where(exists, mx.arange(longest), 0)
    return rows, mx.array([each.drafted + (0,) * (longest - len(each.drafted)) for each in proposed]), exists


def _draft_rows(proposed: Sequence[ProposedRows], begins: Sequence[int], *, like: mx.array) -> mx.array:
    """The draft's distributions in the shape of the target's, with zeros where nothing was drafted; lazy."""
    rows = mx.zeros_like(like)
    certain, drafted = [], []
    for each, begin in zip(proposed, begins, strict=True):
        drawn = [probs for probs in each.draft_probs if isinstance(probs, mx.array)]
        if drawn:
            nothing = mx.zeros_like(drawn[0])
            stacked = mx.stack([probs if isinstance(probs, mx.array) else nothing for probs in each.draft_probs])
            rows[begin : begin + len(each.drafted), : nothing.shape[0]] = stacked
        for i, probs in enumerate(each.draft_probs):
            if isinstance(probs, Sparse):
                rows[begin + i, probs.tokens] = probs.values
            elif probs is None:
                certain.append(begin + i)
                drafted.append(each.drafted[i])
    if certain:
        rows[mx.array(certain), mx.array(drafted)] = 1.0
    return rows


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    """Logits in float32, divided by a temperature > 0; shifted so that the largest is 0 and none overflows."""
    shifted = logits.astype(mx.float32) - mx.max(logits, axis=-1, keepdims=True).astype(mx.float32)
    return shifted / max(temperature, _MIN_TEMPERATURE)


_MIN_TEMPERATURE = 1e-30  # far below any temperature at which a draw differs from the argmax, and not zero in float32
