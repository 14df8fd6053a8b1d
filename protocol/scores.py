"""Scores: the log-probabilities of tokens that are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import attrs
import mlx.core as mx

from protocol.acceptance import likelihoods
from protocol.reprs import brief, excerpt


@attrs.frozen
class TopLogprob:
    """One of the most probable tokens at a position: its id, its text decoded alone, and its log-probability."""

    id: int
    text: str
    logprob: float

    def __repr__(self) -> str:
        return f"TopLogprob(id={self.id}, text={excerpt(self.text)}, logprob={self.logprob:.4g})"


@attrs.frozen
class TokenScore:
    """The score of a token, without texts; see `ScoredToken`. `top`: (id, log-probability), most probable first."""

    id: int
    logprob: float
    is_greedy: bool
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def token_scores(logits: mx.array, tokens: Sequence[int], num_top: int) -> tuple[TokenScore, ...]:
    """The scores of tokens (n,) by logits (n, V), with the `num_top` >= 0 likeliest. Costs a synchronisation."""
    greedy = mx.argmax(logits, axis=-1)
    rows = logits.astype(mx.float32)
    chosen = mx.take_along_axis(rows, mx.array(tuple(tokens))[:, None], axis=-1)
    ranks = 1 + mx.sum(rows > chosen, axis=-1)
    if num_top == 0:
        # Without the others, no row needs to be sorted.
        own = cast(list[float], (chosen[:, 0] - mx.logsumexp(rows, axis=-1)).tolist())
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    else:
        named = likelihoods(logits, tokens, num_top)
        own, tops = [each.logprob for each in named], [each.top for each in named]
    return tuple(
        TokenScore(id, logprob, id == best, rank, top)
        for id, logprob, best, rank, top in zip(
            tokens, own, cast(list[int], greedy.tolist()), cast(list[int], ranks.tolist()), tops, strict=True
        )
    )


@attrs.frozen
class ScoredToken:
    """One token of a scored text.

    Attributes:
        text: what this token makes readable after the ones before it, possibly empty.
        logprob: its log-probability, <= 0, under the target.
        is_greedy: whether it is the argmax: the token that greedy decoding chooses.
        rank: 1 plus the number of tokens that are more probable.
        top_logprobs: the most probable tokens at its position, most probable first; as many as were asked for.
    """

    id: int
    text: str
    logprob: float
    is_greedy: bool
    rank: int
    top_logprobs: tuple[TopLogprob, ...] = ()

    def __repr__(self) -> str:
        names = ["id", "text", "logprob", "is_greedy", *(["top_logprobs"] if self.top_logprobs else [])]
        return brief("ScoredToken", {name: getattr(self, name) for name in names})


@attrs.frozen
class Score:
    """The score of a continuation of at least one token.

    Attributes:
        cached_tokens: how many of the prompt's tokens were still cached.
    """

    tokens: tuple[ScoredToken, ...]
    num_prompt_tokens: int
    cached_tokens: int = 0

    @property
    def logprob(self) -> float:
        """The log-probability of the continuation after the prompt, <= 0: the sum over its tokens."""
        return math.fsum(token.logprob for token in self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding writes the continuation after the prompt."""
        return all(token.is_greedy for token in self.tokens)

    @property
    def perplexity(self) -> float:
        """The exponential of the negative mean log-probability of a token, >= 1; infinite where no float holds it."""
        try:
            return math.exp(-self.logprob / len(self.tokens))
        except OverflowError:
            return math.inf

    def __repr__(self) -> str:
        return brief("Score", {"logprob": self.logprob, "is_greedy": self.is_greedy, "tokens": self.tokens})
