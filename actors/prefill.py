"""Prefill: the prompt goes into a cache, in passes of so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from actors.model import CachedSequence
from actors.workers.worker import Job, Worker
from protocol.cached_tokens import CachedTokens, FeedPlan
from protocol.messages import Open
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS, PrefillChunkSize

# Tokens before the end of a prompt at which it is pinned as well: what asks for an answer there, such as a tag that
# begins a thought, is left out where a template repeats the answer.
BEFORE_THE_END = 16


async def prefill(
    worker: Worker, sequence: CachedSequence, cached_tokens: CachedTokens, opened: Open, chunk_size: PrefillChunkSize
) -> None:
    """Feed the prompt but for its last token, whose logits the first round wants, and what is held already.

    Args:
        chunk_size: of the model; used where the setting is "auto", and kept informed in any case.

    Cancellation: strikes between two passes. A pass is a job, so that is also where other sessions
    have their turn.
    """
    most = len(opened.prompt) - 1
    prefix_checkpoints = (
        {most - BEFORE_THE_END, most} if opened.settings.reuse_prefix and sequence.needs_prefix_checkpoints else set()
    )
    step = step_size(opened.settings.prefill_step_size, sequence)
    while len(cached_tokens) < most:
        end = _end_of_pass(
            len(cached_tokens),
            most,
            chunk_size() if step == "auto" else step,
            prefix_checkpoints,
            is_aligned=step != "auto",
        )
        plan = cached_tokens.plan(opened.prompt[:end], num_logits=0)
        job = Job(
            "prefill", partial(_read, sequence, plan.feed, end in prefix_checkpoints), opened.session, len(plan.feed)
        )
        await worker.run(job)
        chunk_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)


async def read_on(
    worker: Worker,
    sequence: CachedSequence,
    cached_tokens: CachedTokens,
    opened: Open,
    committed: Sequence[int],
    chunk_size: PrefillChunkSize,
) -> None:
    """Feed some of the committed tokens that a cache is behind, in one pass.

    Args:
        committed: the session's text so far.
        chunk_size: of the model.

    Cancellation: strikes after the pass.
    """
    step = opened.settings.prefill_step_size
    plan = cached_tokens.plan(committed, num_logits=0)
    plan = FeedPlan(plan.keep, plan.feed[: chunk_size() if step == "auto" else step])
    job = Job("prefill", partial(_go_back_and_read, sequence, plan), opened.session, len(plan.feed))
    length = await worker.run(job)
    if length < plan.keep:  # it could only go back to a checkpoint, and read nothing
        cached_tokens.rewind(length)
    else:
        chunk_size.observe(job.num_tokens, job.seconds)
        cached_tokens.follow(plan)


def step_size(setting: int | Literal["auto"], sequence: CachedSequence) -> int | Literal["auto"]:
    """Tokens in a pass; "auto" where prices decide, and may decide otherwise in each pass."""
    return FIXED_CHUNK_TOKENS if setting == "auto" and sequence.depends_on_passes else setting


def _end_of_pass(begin: int, most: int, size: int, prefix_checkpoints: set[int], *, is_aligned: bool) -> int:
    """Where a pass ends: after `size` tokens, or at the next multiple of that, at a pin, or at the end of the prompt.

    With a quantised cache it matters where: it is quantised at the end of a pass.
    """
    end = (begin // size + 1) * size if is_aligned else begin + size
    return min(
        end,
        most,
        *(pin for pin in prefix_checkpoints if pin > begin),
    )


def _read(sequence: CachedSequence, tokens: tuple[int, ...], pin: bool) -> None:
    sequence.feed(tokens, 0)
    if pin:
        sequence.add_prefix_checkpoint()


def _go_back_and_read(sequence: CachedSequence, plan: FeedPlan) -> int:
    length = sequence.rewind(plan.keep)
    if length == plan.keep:
        sequence.feed(plan.feed, 0)
        sequence.check(plan.keep + len(plan.feed))
    return length
