"""The log-probabilities of a prompt, in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable

# pydantic cannot read `typing.TypedDict` before Python 3.12.
from typing_extensions import TypedDict

from protocol.scores import Score, ScoredToken
from runtime.server.openai.token_logprobs import finite


class PromptLogprob(TypedDict):
    """The log-probability of a token of the prompt, or of a likely other one; the most probable has the rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt, log-probabilities by token id; None for the first one, which nothing precedes."""


def prompt_logprobs(score: Score | None, num_top: int, decoded: Callable[[int], str]) -> PromptLogprobs:
    """The log-probabilities of a prompt.

    Args:
        score: of all tokens but the first; None where there are no others.
        num_top: how many of the most probable tokens to name beside each.
        decoded: returns the text of a token alone.
    """
    return [None, *(_at(token, num_top, decoded) for token in (() if score is None else score.tokens))]


def _at(token: ScoredToken, num_top: int, decoded: Callable[[int], str]) -> dict[str, PromptLogprob]:
    own: PromptLogprob = {
        "logprob": finite(token.logprob),
        "rank": token.rank,
        "decoded_token": decoded(token.id),
    }
    tops: dict[str, PromptLogprob] = {
        str(top.id): {"logprob": finite(top.logprob), "rank": rank, "decoded_token": top.text}
        for rank, top in enumerate(token.top_logprobs[:num_top], start=1)
    }
    return {str(token.id): own} | tops
