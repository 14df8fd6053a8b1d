"""Scores a prompt's last tokens, for a session that asks for scores and not for new text."""

from __future__ import annotations

from functools import partial

from actors.model import CachedSequence
from actors.prefill import tokens_per_pass
from actors.sampling.logit_check import LogitCheck
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, Worker
from protocol.prefill_chunks import PrefillChunkSize
from protocol.scores import TokenScore, token_scores

# Most logits of one pass: 64 MiB in float32. A long text with a large vocabulary would take gigabytes.
_MAX_LOGITS = 2**24


async def score_chunk(worker: Worker, session: TargetSession, chunk_size: PrefillChunkSize, vocab_size: int) -> None:
    """Feed the next chunk of the tokens to score, and score the token after each. The tokens before must be read.

    Args:
        chunk_size: of passes that score; updated.
        vocab_size: width of the logits.

    Cancellation: strikes after the pass.
    """
    sequence, cached_tokens, opened = session.sequence, session.cached_tokens, session.shared.opened
    assert sequence is not None
    pass_tokens = tokens_per_pass(opened.settings.prefill_step_size, sequence)
    size = min(chunk_size() if pass_tokens == "auto" else pass_tokens, max(1, _MAX_LOGITS // vocab_size))
    begin = len(cached_tokens)
    end = min(begin + size, len(opened.prompt) - 1)
    plan = cached_tokens.plan(opened.prompt[:end], num_logits=0)
    scored = opened.prompt[begin + 1 : end + 1]
    call = partial(_score, sequence, plan.feed, scored, opened.settings.logprobs, begin)
    job = Job("prefill", call, session.id, len(plan.feed))
    scores = await worker.run(job)
    session.shared.scores += scores
    chunk_size.observe(job.num_tokens, job.seconds)
    cached_tokens.follow(plan)


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
