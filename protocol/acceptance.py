"""The acceptance rules: how much of a proposal stands, and which token comes next.

*p* is the target's distribution at a position, *q* the draft's, *d* the drafted token.

**match**: target and draft each make a choice at a position, and *d* stands while it is the target's
own choice. At temperature 0 the choice is the argmax, and the output is the target's greedy output,
token for token. Above, both take `argmax(log p + g)` with the same Gumbel noise g, which depends on
(seed, position) alone (the Gumbel coupling of Daliri, Musco and Suresh 2024, arXiv 2408.07978): each
token is an exact sample of p, the text does not depend on the drafter at all, and close distributions
choose alike, with probability at least (1 - TV) / (1 + TV). Where a user's sampler makes the choice, it is compared in
the same way; the target's own stands whatever was drafted, so each token is what the sampler makes of p.

**rejection** (Leviathan, Kalman and Matias 2023, arXiv 2211.17192, algorithm 1): *d* stands with
probability min(1, p(d)/q(d)). At the first rejection a token is *recovered* from the residual
max(0, p - q), normalised; after a full acceptance a *bonus* token is drawn from p. Each token is an
exact sample of p for any q from which d was really drawn; acceptance is 1 - TV.

The logits here are those after processors and filters, which leave a token out by -inf; the temperature is still to
be applied.

Everything here is lazy until the one `mx.eval` in `judge_*`, so that a round costs one
synchronisation, and another one where log-probabilities are asked for. What else is to be known of the same logits is
evaluated in that one, too (`beside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import attrs
import mlx.core as mx

from protocol.errors import ProtocolError
from protocol.messages import Likelihood
from protocol.randomness import Purpose, key_for


@attrs.frozen
class Judgement:
    """What the target says of one proposal.

    Attributes:
        num_accepted: drafted tokens that stand.
        token: the token after those: recovered after a rejection, the bonus after a full acceptance.
            None where all stand and the forward pass had no row for a bonus (the N=1 fallback).
    """

    num_accepted: int
    token: int | None


def likelihoods(logits: mx.array, tokens: Sequence[int], num_top: int) -> tuple[Likelihood, ...]:
    """How likely tokens were, and which were the likeliest.

    Args:
        logits: (n, V) with n >= len(tokens), the target's, processed, of the tokens' positions.
        tokens: (m,) that were chosen there.
        num_top: how many of the likeliest to name, >= 1; all V where there are fewer.

    Returns: one for each token. Costs a synchronisation.
    """
    rows = logits[: len(tokens)].astype(mx.float32)
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.array(tuple(tokens))[:, None], axis=-1)
    order = mx.argsort(-logprobs, axis=-1)[:, :num_top]
    best = mx.take_along_axis(logprobs, order, axis=-1)
    mx.eval(chosen, order, best)
    ids, tops = cast(list[list[int]], order.tolist()), cast(list[list[float]], best.tolist())
    return tuple(
        Likelihood(own, tuple(zip(row_ids, row_tops, strict=True)))
        for (own,), row_ids, row_tops in zip(cast(list[list[float]], chosen.tolist()), ids, tops, strict=True)
    )


# --- match ----------------------------------------------------------------------------------------


def choices(logits: mx.array, temperature: float, seed: int, start: int, noise_size: int) -> mx.array:
    """The token that a model takes at each position, under the match rule.

    Args:
        logits: (n, V) logits for positions start … start + n - 1.
        temperature: >= 0; 0 takes the argmax and uses no noise.
        seed: of the session, in [0, 2**64).
        start: absolute position of the first row.
        noise_size: the width at which noise is made, >= V. It must be the same for both models, since
            the noise of an array's entry depends on the array's size.

    Returns: (n,) token ids, lazy.
    """
    return mx.argmax(scores(logits, temperature, seed, start, noise_size), axis=-1)


def scores(logits: mx.array, temperature: float, seed: int, start: int, noise_size: int) -> mx.array:
    """That of which the token that a model takes is the argmax, under the match rule: (n, V), lazy.

    Args: as `choices`.
    """
    if temperature == 0:
        return logits
    noise = mx.stack(
        [mx.random.gumbel((noise_size,), key=key_for(seed, Purpose.NOISE, start + i)) for i in range(logits.shape[0])]
    )
    return _tempered(logits, temperature) + noise[:, : logits.shape[1]]


def likeliest(scores: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The best tokens by score, best first, and the share that a softmax of the scores gives each.

    Args:
        scores: (n, V).
        count: >= 1.

    Returns: (n, count) token ids and (n, count) shares in [0, 1], lazy.
    """
    left = scores.astype(mx.float32)
    total = mx.logsumexp(left, axis=-1, keepdims=True)
    ids = mx.arange(left.shape[1])
    tokens, shares = [], []
    for i in range(count):
        best = mx.argmax(left, axis=-1, keepdims=True)
        tokens.append(best)
        shares.append(mx.exp(mx.take_along_axis(left, best, axis=-1) - total))
        if i + 1 < count:
            left = mx.where(ids == best, -mx.inf, left)
    return mx.concatenate(tokens, axis=-1), mx.concatenate(shares, axis=-1)


def count_matches(chosen: list[int], drafted: tuple[int, ...]) -> int:
    """Length of the prefix on which the drafted tokens are the target's choices.

    Args:
        chosen: (k,) or (k + 1,) the target's choice at each position of the proposal and after it.
        drafted: (k,) drafted tokens.

    Returns: int in [0, k].
    """
    for i, (ours, theirs) in enumerate(zip(chosen, drafted, strict=False)):
        if ours != theirs:
            return i
    return len(drafted)


def judge_by_match(
    logits: mx.array,
    drafted: tuple[int, ...],
    *,
    temperature: float,
    seed: int,
    start: int,
    beside: Sequence[mx.array] = (),
    chosen: mx.array | None = None,
) -> Judgement:
    """Judge a proposal by the match rule.

    Args:
        logits: (k + 1, V) the target's logits for each drafted position and the one after; or (k, V)
            where there is no row for a bonus token.
        drafted: (k,) drafted tokens.
        temperature: >= 0.
        seed: of the session.
        start: absolute position of the first drafted token.
        beside: what else to evaluate, while it costs no synchronisation of its own.
        chosen: (rows,) the target's choices, where something else makes them than the temperature.

    Raises: ProtocolError: the number of rows fits neither.
    """
    _check_rows(logits, drafted)
    if chosen is None:
        chosen = choices(logits, temperature, seed, start, logits.shape[1])
    mx.eval(chosen, *beside)
    ids = cast(list[int], chosen.tolist())
    num_accepted = count_matches(ids, drafted)
    return Judgement(num_accepted, ids[num_accepted] if num_accepted < len(ids) else None)


# --- rejection ------------------------------------------------------------------------------------


def distribution(logits: mx.array, temperature: float) -> mx.array:
    """Probabilities (…, V) in float32 of logits (…, V) at a temperature > 0; lazy."""
    return mx.softmax(_tempered(logits, temperature), axis=-1)


def draw(probs: mx.array, key: mx.array) -> mx.array:
    """One token id drawn from probabilities (V,), which need not be normalised; lazy, shape ()."""
    return mx.random.categorical(mx.log(probs), key=key)


def count_accepted(target_probs: mx.array, draft_probs: mx.array, uniforms: mx.array) -> mx.array:
    """Length of the accepted prefix of one proposal.

    Args:
        target_probs: (k,) probability of each drafted token under the target.
        draft_probs: (k,) likewise under the draft, as it was when the token was drawn; > 0.
        uniforms: (k,) draws in [0, 1).

    Returns: int in [0, k], lazy, shape (); k means that a bonus token is due.
    Raises: ProtocolError: the lengths differ.
    Source: Leviathan et al. 2023, arXiv 2211.17192, algorithm 1.
    """
    if not target_probs.shape == draft_probs.shape == uniforms.shape:
        raise ProtocolError(
            f"a proposal needs one probability and one uniform number a token, got "
            f"{target_probs.shape}, {draft_probs.shape} and {uniforms.shape}"
        )
    # Multiply, don't divide: a token to which the target gives zero stays rejected even when u == 0.
    accepted = uniforms * draft_probs < target_probs
    return mx.cumprod(accepted.astype(mx.int32)).sum()


def residual(target_probs: mx.array, draft_probs: mx.array) -> mx.array:
    """The distribution from which a recovered token is drawn: max(0, p - q), not normalised; lazy.

    Args:
        target_probs: (…, V).
        draft_probs: (…, V); zeros make it p itself, which is how a bonus token is drawn.

    Returns: (…, V). Where rounding leaves nothing of p - q, which only happens where p and q are equal
        but for rounding, it is p.
    """
    left = mx.maximum(target_probs - draft_probs, 0)
    return mx.where(left.sum(axis=-1, keepdims=True) > 0, left, target_probs)


def judge_by_rejection(
    logits: mx.array,
    drafted: tuple[int, ...],
    draft_probs: tuple[mx.array | None, ...],
    *,
    temperature: float,
    seed: int,
    start: int,
    beside: Sequence[mx.array] = (),
) -> Judgement:
    """Judge a proposal by the rejection rule.

    Args:
        logits: (k + 1, V) the target's logits for each drafted position and the one after; or (k, V)
            where there is no row for a bonus token.
        drafted: (k,) drafted tokens, each drawn from its row of draft_probs.
        draft_probs: k arrays (W,) with W <= V; entries beyond W are zero. None where the drafted token was no
            draw but the only one that could have come: q is 1 there and 0 elsewhere, so that it stands with
            probability p(d), and the recovered token is any other.
        temperature: > 0.
        seed: of the session.
        start: absolute position of the first drafted token.
        beside: as in `judge_by_match`.

    Raises: ProtocolError: the numbers of rows, tokens and distributions do not fit.
    """
    _check_rows(logits, drafted)
    if len(draft_probs) != len(drafted):
        raise ProtocolError(f"{len(drafted)} drafted tokens came with {len(draft_probs)} distributions")
    p = distribution(logits, temperature)
    if not drafted:
        token = draw(p[0], key_for(seed, Purpose.RECOVER, start))
        mx.eval(token, *beside)
        return Judgement(0, _to_int(token))
    q = _draft_rows(drafted, draft_probs, like=p)
    rows, tokens = mx.arange(len(drafted)), mx.array(drafted)
    uniforms = mx.stack([mx.random.uniform(key=key_for(seed, Purpose.ACCEPT, start + i)) for i in range(len(drafted))])
    accepted = count_accepted(p[rows, tokens], q[rows, tokens], uniforms)
    # Which row the next token is drawn from is known on the device only; index by the lazy number, since
    # asking for it here would be a second synchronisation.
    row = mx.minimum(accepted, logits.shape[0] - 1)
    keys = mx.stack([key_for(seed, Purpose.RECOVER, start + i) for i in range(logits.shape[0])])
    token_after = draw(residual(p[row], q[row]), keys[row])
    mx.eval(accepted, token_after, *beside)
    num_accepted = _to_int(accepted)
    return Judgement(num_accepted, _to_int(token_after) if num_accepted < logits.shape[0] else None)


def _draft_rows(drafted: tuple[int, ...], draft_probs: tuple[mx.array | None, ...], *, like: mx.array) -> mx.array:
    """The draft's distributions in the shape of the target's; zeros where there is none. Lazy."""
    rows = mx.zeros_like(like)
    drawn = [probs for probs in draft_probs if probs is not None]
    if drawn:
        nothing = mx.zeros_like(drawn[0])
        rows[: len(drafted), : nothing.shape[0]] = mx.stack([nothing if p is None else p for p in draft_probs])
    if certain := [i for i, probs in enumerate(draft_probs) if probs is None]:
        rows[mx.array(certain), mx.array([drafted[i] for i in certain])] = 1.0
    return rows


def _tempered(logits: mx.array, temperature: float) -> mx.array:
    """Logits in float32 over a temperature > 0, shifted so that the largest is 0 and none overflows."""
    shifted = logits.astype(mx.float32) - mx.max(logits, axis=-1, keepdims=True).astype(mx.float32)
    return shifted / max(temperature, _COLDEST)


# Far below any temperature that differs from the argmax, and not zero in float32.
_COLDEST = 1e-30


def _to_int(scalar: mx.array) -> int:
    return cast(int, scalar.item())


def _check_rows(logits: mx.array, drafted: tuple[int, ...]) -> None:
    rows = logits.shape[0]
    if rows not in (len(drafted), len(drafted) + 1) or rows == 0:
        raise ProtocolError(f"{len(drafted)} drafted tokens need as many rows of logits or one more, got {rows}")
