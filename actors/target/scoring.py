"""The scores of a prompt's last tokens, if those are what the session is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from actors.model import CachedSequence
from actors.prefill import tokens_per_pass
from actors.sampling.logit_check import LogitCheck
from protocol.cached_tokens import CachedTokens, FeedPlan
from protocol.messages import Open
from protocol.prefill_chunks import PrefillChunkSize
from protocol.scores import TokenScore, token_scores

# Most logits of one pass: 64 MiB in float32. A long text with a large vocabulary would take gigabytes.
_MAX_LOGITS = 2**24


def next_scored_chunk(
    sequence: CachedSequence,
    cached_tokens: CachedTokens,
    opened: Open,
    chunk_size: PrefillChunkSize,
    vocab_size: int,
) -> tuple[FeedPlan, Callable[[], tuple[TokenScore, ...]]]:
    """The next part of the tokens to score, once the tokens before them were read.

    Args:
        chunk_size: of passes that score.
        vocab_size: width of the logits.

    Returns: what it feeds, and a call for the model's thread that feeds it and scores the tokens that follow each.
    """
    pass_tokens = tokens_per_pass(opened.settings.prefill_step_size, sequence)
    size = min(chunk_size() if pass_tokens == "auto" else pass_tokens, max(1, _MAX_LOGITS // vocab_size))
    begin = len(cached_tokens)
    end = min(begin + size, len(opened.prompt) - 1)
    plan = cached_tokens.plan(opened.prompt[:end], num_logits=0)
    scored = opened.prompt[begin + 1 : end + 1]
    return plan, partial(_score, sequence, plan.feed, scored, opened.settings.logprobs, begin)


def _score(
    sequence: CachedSequence, feed: tuple[int, ...], tokens: tuple[int, ...], num_top: int, begin: int
) -> tuple[TokenScore, ...]:
    """Feed tokens, and score those that follow each of them.

    Raises: NotANumberError: the logits are no numbers.
    """
    logits = sequence.feed(feed, len(feed))
    assert logits is not None, "rows of logits were asked for"
    check = LogitCheck.of(logits, logits)
    scores = token_scores(logits, tokens, num_top)
    if (num_sound := check.num_sound()) < len(tokens):
        check.check(num_sound, begin + 1 + num_sound, "target")
    return scores
