"""A first measurement of the prices, before anybody waits for a token.

It takes a score of forward passes. What it finds is where the averages of `protocol.prices` begin.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import mlx.core as mx
import trio

from actors.model import CachedSequence, Model
from actors.sampling.logits_pipeline import NO_HISTORY, LogitsPipeline
from actors.target_jobs import PlainDecoder
from actors.workers.worker import Job, JobError, Worker
from protocol.cached_tokens import FeedPlan
from protocol.messages import Open
from protocol.prices import Prices
from protocol.settings import Settings

TEXT = 8  # tokens before the first pass
WIDTHS = (1, 4, 1, 4)
PLAIN_STEPS = 6
# Draft steps beside the target's passes, at most: a drafter may be very much faster.
MOST_BESIDE = 48
# A model with less room than this is measured as it goes.
LEAST_CONTEXT = 128

_OPENED = Open(session=0, prompt=(0,), settings=Settings(), seed=0, stop_tokens=frozenset())


async def warm_up(target: tuple[Model, Worker], draft: tuple[Model, Worker], prices: Prices) -> None:
    """Time both models, each alone and both at once, and plain decoding where no stream has shown yet what it costs.

    Cancellation: strikes after the passes that are running.

    Raises: JobError: a model failed.
    """
    if any(model.context_length is not None and model.context_length < LEAST_CONTEXT for model, _ in (target, draft)):
        return
    (_, target_worker), (_, draft_worker) = target, draft
    async with _open_sequence(*target) as ours, _open_sequence(*draft) as theirs:
        # The first pass of each width builds kernels and buffers.
        for width in sorted(set(WIDTHS)):
            await target_worker.run(_pass(ours, width))
            await draft_worker.run(_pass(theirs, width))
        for width in WIDTHS:
            job = _pass(theirs, width)
            await draft_worker.run(job)
            prices.observe_draft_step(width, job.began, job.ended, beside_target=False)
        for width in WIDTHS:
            job = _pass(ours, width)
            await target_worker.run(job)
            prices.observe_verify_pass(width, job.began, job.ended)
        await _side_by_side((ours, target_worker), (theirs, draft_worker), prices)
    if not prices.plain_decode_s.is_known:
        async with _open_sequence(*target) as ours:
            await _decode_plainly(ours, target_worker, prices)


async def _side_by_side(
    ours: tuple[CachedSequence, Worker], theirs: tuple[CachedSequence, Worker], prices: Prices
) -> None:
    """Passes of the target, with a drafter beside them."""
    is_over = False
    # Not left to the nursery, which would wrap them in a group.
    errors: list[JobError] = []

    async def draft_on() -> None:
        sequence, worker = theirs
        try:
            for _ in range(MOST_BESIDE):
                if is_over:
                    return
                job = _pass(sequence, 1)
                await worker.run(job)
                prices.observe_draft_step(1, job.began, job.ended, beside_target=True)
        except JobError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draft_on)
        sequence, worker = ours
        try:
            for width in WIDTHS:
                job = _pass(sequence, width)
                await worker.run(job)
                prices.observe_verify_pass(width, job.began, job.ended)
        except JobError as error:
            errors.append(error)
        is_over = True
    if errors:
        raise errors[0]


async def _decode_plainly(sequence: CachedSequence, worker: Worker, prices: Prices) -> None:
    """Tokens without a drafter, one pass ahead, as in a stream."""
    decoder, plan = PlainDecoder(sequence, _OPENED, LogitsPipeline(_OPENED)), FeedPlan(TEXT, (0,))
    for i in range(PLAIN_STEPS):
        length, began = plan.keep + len(plan.feed), worker.clock()
        await worker.run(Job("warm-up", partial(decoder.step, plan, NO_HISTORY, length, True), None, 1))
        if i > 0:
            prices.plain_decode_s.observe(worker.clock() - began)
        plan = FeedPlan(length + 1, ())


@asynccontextmanager
async def _open_sequence(model: Model, worker: Worker) -> AsyncIterator[CachedSequence]:
    sequence = await worker.run(Job("warm-up", partial(model.open_sequence, beside_another=True)))
    try:
        await worker.run(Job("warm-up", partial(sequence.feed, (0,) * TEXT, 0), None, TEXT))
        yield sequence
    finally:
        with trio.CancelScope(shield=True):
            await worker.run(Job("warm-up", sequence.close))


def _pass(sequence: CachedSequence, width: int) -> Job[None]:
    def call() -> None:
        mx.eval(sequence.feed((0,) * width, width))

    # Of a kind that is counted for no session.
    return Job("warm-up", call, None, width)
