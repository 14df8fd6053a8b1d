"""The scores of a prompt's last tokens, if those are what the session is for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from actors.model import CachedSequence
from actors.prefill import tokens_per_pass
from actors.sampling.logit_check import LogitCheck
from actors.target.target_session import TargetSession
from actors.workers.worker import Job, RunsJobs
from protocol.messages import Close
from protocol.prefill_chunks import PrefillChunkSize
from protocol.scores import TokenScore, token_scores

# Most logits of one pass: 64 MiB in float32. A long text with a large vocabulary would take gigabytes.
_MAX_LOGITS = 2**24


async def score_prompt(
    worker: RunsJobs, sequence: CachedSequence, session: TargetSession, chunk_size: PrefillChunkSize, vocab_size: int
) -> None:
    """After prefill, in a session that scores: feed the tokens to be scored, and close the session.

    Args:
        chunk_size: of passes that score; updated.
        vocab_size: width of its logits.

    Cancellation: strikes between two passes. Each pass is a job, so other sessions take their turns there.
    """
    opened, cached_tokens = session.shared.opened, session.cached_tokens
    if opened.num_scored == 0:
        return
    pass_tokens = tokens_per_pass(opened.settings.prefill_step_size, sequence)
    while (begin := len(cached_tokens)) < len(opened.prompt) - 1:
        size = min(chunk_size() if pass_tokens == "auto" else pass_tokens, max(1, _MAX_LOGITS // vocab_size))
        end = min(begin + size, len(opened.prompt) - 1)
        plan = cached_tokens.plan(opened.prompt[:end], num_logits=0)
        call = partial(_score, sequence, plan.feed, opened.prompt[begin + 1 : end + 1], opened.settings.logprobs, begin)
        job: Job[Iterable[TokenScore]] = Job("prefill", call, opened.session, len(plan.feed))
        session.shared.scores += await worker.run(job)
        chunk_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)
    session.state.close(Close(session.id))


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
