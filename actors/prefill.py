"""Prefill: feeds the prompt into a cached sequence, in passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from actors.actor import ActorSession
from actors.model import CachedSequence
from actors.workers.worker import Job, Worker
from protocol.cached_tokens import FeedPlan
from protocol.prefill_chunks import PrefillChunkSize


def can_read_together(session: ActorSession) -> bool:
    """Whether the whole prompt may be read in one pass that other texts share."""
    sequence = session.sequence
    assert sequence is not None
    return (
        sequence.length == 0
        and sequence.reads_with_others
        and session.opened.num_read > 0
        and tokens_per_pass(session) == "auto"
        and not _prefix_checkpoints(session)
    )


def reads_in_one_pass(session: ActorSession) -> bool:
    """Whether a pass may end anywhere in what is left of the prompt, or beyond it."""
    num_cached = len(session.cached_tokens)
    return (
        tokens_per_pass(session) == "auto"
        and session.cached_tokens.plan(session.opened.prompt, num_logits=1).keep == num_cached
        and all(length <= num_cached for length in _prefix_checkpoints(session))
    )


def _prefix_checkpoints(session: ActorSession) -> set[int]:
    reusable = session.sequence.reusable if session.sequence is not None and session.settings.reuse_prefix else None
    return session.checkpoints if reusable is not None and reusable.needs_prefix_checkpoints else set()


async def prefill_chunk(
    worker: Worker, session: ActorSession, text: Sequence[int], chunk_size: PrefillChunkSize
) -> Job[int]:
    """Feed the next part of `text`, a beginning of the session's, that its cache lacks, in one pass, which it returns.

    `chunk_size` is updated, and used if the setting is "auto". Cancellation: strikes after the pass.
    """
    session.notice_loss()
    sequence, cached_tokens = session.sequence, session.cached_tokens
    assert sequence is not None
    plan = cached_tokens.plan(text, num_logits=0)
    checkpoints = _prefix_checkpoints(session)
    pass_tokens = tokens_per_pass(session)
    is_aligned = pass_tokens != "auto"
    size = chunk_size.of(len(plan.feed)) if pass_tokens == "auto" else pass_tokens
    # Where the text depends on its passes, they end where they did when the prompt was read first.
    stops = checkpoints | {session.opened.num_read} if is_aligned else checkpoints
    end = _end_of_pass(plan.keep, len(text), size, stops, is_aligned=is_aligned)
    plan = FeedPlan(plan.keep, plan.feed[: end - plan.keep])
    call = partial(_rewind_and_feed, sequence, plan, adds_checkpoint=end in checkpoints)
    job = Job("prefill", call, session.id, len(plan.feed))
    length = await worker.run(job)
    if length < plan.keep:  # only a checkpoint below could be restored; nothing was fed
        cached_tokens.rewind(length)
    else:
        chunk_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)
    return job


def tokens_per_pass(session: ActorSession) -> int | Literal["auto"]:
    """Tokens in a pass over a session's prompt; "auto" if measured prices decide for each pass."""
    assert session.sequence is not None
    return session.pass_tokens if session.sequence.depends_on_passes else session.settings.prefill_step_size


def _end_of_pass(begin: int, num_read: int, size: int, stops: set[int], *, is_aligned: bool) -> int:
    """The length at which a pass ends: `size` tokens on, or at its next multiple, but not beyond a stop."""
    end = (begin // size + 1) * size if is_aligned else begin + size
    return min(end, num_read, *(length for length in stops if length > begin))


def _rewind_and_feed(sequence: CachedSequence, plan: FeedPlan, *, adds_checkpoint: bool) -> int:
    """Returns: the length after the rewind; nothing is fed if that is less than `plan.keep`."""
    length = sequence.rewind(plan.keep)
    if length == plan.keep:
        sequence.feed(plan.feed, 0)
        sequence.check(plan.keep + len(plan.feed))
        if adds_checkpoint and (reusable := sequence.reusable) is not None:
            reusable.add_prefix_checkpoint()
    return length
