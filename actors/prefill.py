"""Prefill: feeds the prompt into a cached sequence, in passes of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from actors.actor import ActorSession
from actors.model import CachedSequence
from actors.workers.worker import Job, Worker
from protocol.cached_tokens import FeedPlan
from protocol.messages import Open
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS, PrefillChunkSize

# Besides the one at the end of a prompt, a prefix checkpoint is made this many tokens before it: in the next prompt, a
# chat template leaves out the tokens that asked for the answer, such as a tag that begins reasoning.
CHECKPOINT_DISTANCE = 16


def can_read_together(sequence: CachedSequence, opened: Open) -> bool:
    """Whether the whole prompt may be read in one pass that other texts share."""
    return (
        sequence.length == 0
        and sequence.reads_with_others
        and opened.num_read > 0
        and tokens_per_pass(opened.settings.prefill_step_size, sequence) == "auto"
        and not _prefix_checkpoints(sequence, opened)
    )


def _prefix_checkpoints(sequence: CachedSequence, opened: Open) -> set[int]:
    reusable = sequence.reusable if opened.settings.reuse_prefix else None
    if reusable is None or not reusable.needs_prefix_checkpoints:
        return set()
    return {opened.num_read - CHECKPOINT_DISTANCE, opened.num_read}


async def prefill_chunk(worker: Worker, session: ActorSession, chunk_size: PrefillChunkSize) -> Job[None]:
    """Feed the next part of a prompt that was not read to its end, in one pass, and update `chunk_size`, which is used
    if the setting is "auto". Returns: the pass. Cancellation: strikes after the pass.
    """
    sequence, cached_tokens, opened = session.sequence, session.cached_tokens, session.shared.opened
    assert sequence is not None
    prefix_checkpoints = _prefix_checkpoints(sequence, opened)
    pass_tokens = tokens_per_pass(opened.settings.prefill_step_size, sequence)
    size = chunk_size.of(opened.num_read - len(cached_tokens)) if pass_tokens == "auto" else pass_tokens
    is_aligned = pass_tokens != "auto"
    end = _end_of_pass(len(cached_tokens), opened.num_read, size, prefix_checkpoints, is_aligned=is_aligned)
    plan = cached_tokens.plan(opened.prompt[:end], num_logits=0)
    call = partial(_feed, sequence, plan.feed, adds_checkpoint=end in prefix_checkpoints)
    job = Job("prefill", call, session.id, len(plan.feed))
    await worker.run(job)
    chunk_size.observe(job.num_tokens, job.seconds)
    cached_tokens.follow(plan)
    return job


async def prefill_committed(
    worker: Worker, session: ActorSession, committed: Sequence[int], chunk_size: PrefillChunkSize
) -> Job[int]:
    """Feed tokens of the session's text that a cache lacks, in one pass, which is returned. Cancellation: strikes after
    the pass.
    """
    sequence, cached_tokens = session.sequence, session.cached_tokens
    assert sequence is not None
    plan, setting = cached_tokens.plan(committed, num_logits=0), session.shared.opened.settings.prefill_step_size
    size = chunk_size.of(len(plan.feed)) if setting == "auto" else setting
    plan = FeedPlan(plan.keep, plan.feed[:size])
    job = Job("prefill", partial(_rewind_and_feed, sequence, plan), session.id, len(plan.feed))
    length = await worker.run(job)
    if length < plan.keep:  # the cache was lost, or only a checkpoint below could be restored; nothing was fed
        cached_tokens.rewind(length)
    else:
        chunk_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)
    return job


def tokens_per_pass(setting: int | Literal["auto"], sequence: CachedSequence) -> int | Literal["auto"]:
    """Tokens in a pass; "auto" if measured prices decide anew for each pass."""
    return FIXED_CHUNK_TOKENS if setting == "auto" and sequence.depends_on_passes else setting


def _end_of_pass(begin: int, num_read: int, size: int, prefix_checkpoints: set[int], *, is_aligned: bool) -> int:
    """The length at which a pass ends: `size` tokens on, or at the next multiple, but not beyond a checkpoint or the
    end of the prompt. Alignment matters for a quantised cache, which is quantised at the end of a pass.
    """
    end = (begin // size + 1) * size if is_aligned else begin + size
    return min(end, num_read, *(length for length in prefix_checkpoints if length > begin))


def _feed(sequence: CachedSequence, tokens: tuple[int, ...], *, adds_checkpoint: bool) -> None:
    sequence.feed(tokens, 0)
    if adds_checkpoint and (reusable := sequence.reusable) is not None:
        reusable.add_prefix_checkpoint()


def _rewind_and_feed(sequence: CachedSequence, plan: FeedPlan) -> int:
    """Returns: the length after the rewind; nothing is fed if that is less than `plan.keep`."""
    # A pass that the text has shared may have failed since the plan was made, and emptied the cache.
    length = sequence.rewind(min(plan.keep, sequence.length))
    if length == plan.keep:
        sequence.feed(plan.feed, 0)
        sequence.check(plan.keep + len(plan.feed))
    return length
