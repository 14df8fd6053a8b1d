"""Warm-up: the first measurement of the prices, by some thirty passes of the target and up to sixty draft steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import trio

from actors.model import CachedSequence, Model
from actors.sampling.logits_pipeline import LogitsPipeline
from actors.target.passes import Passes, Row, RowResult
from actors.trained.feature_input import FeatureInput
from actors.workers.worker import Job, JobError, Steps, Worker, job_error
from protocol.acceptance import distribution, draw, likeliest, scores
from protocol.cached_tokens import FeedPlan
from protocol.messages import Open
from protocol.prices import Prices
from protocol.randomness import Purpose, key_for
from protocol.settings import Settings
from protocol.trace import Share

NUM_TEXT_TOKENS = 8  # fed before the first pass
DRAFT_WIDTHS, TARGET_WIDTHS = (1, 4), (1, 2, 4, 8)  # tokens of each timed pass
# These are timed, too, as long as the pass before took at most this many times as long as one token's: on a GPU, many
# rows may cost no more than a few, and how many streams speculate together depends on that.
WIDE_WIDTHS, MAX_COST_BEFORE_WIDER = (16, 32, 64), 5.0
NUM_PASSES_ALONE = 2  # of each width
NUM_PLAIN_STEPS = 6
MAX_REPEATS = 2  # of a measurement whose prices are implausible
TEMPERATURE = 1.0  # of the sampled tokens
# Most draft steps beside the target's passes: a drafter may be very much faster than the target.
MAX_STEPS_BESIDE_TARGET = 48
MAX_TOKENS = 256  # more than any warm-up feeds
MIN_CONTEXT_LENGTH = 128  # a model with a shorter context is not warmed up: its prices are measured while it works

_OPENED = Open(session=0, prompt=(0,), settings=Settings(), seed=0, stop_tokens=frozenset())


async def warm_up(target: tuple[Model, Worker], draft: tuple[Model, Worker] | None, prices: Prices) -> None:
    """Time both models, alone and at once, and plain decoding, if its price is not known; again if implausible.

    Cancellation: strikes after the running passes. Raises: JobError: a model failed.
    """
    if _is_short(target[0]) or (draft is not None and _is_short(draft[0])):
        return
    is_first = not prices.plain_decode_s.is_known
    await _measure(target, draft, prices)
    for _ in range(MAX_REPEATS):
        if not is_first or prices.estimates().is_plausible:
            return
        prices.forget_target()
        prices.forget_drafter()
        await _measure(target, draft, prices)


async def time_drafter(draft: tuple[Model, Worker], prices: Prices) -> None:
    """Time a draft model whose target is in another process. Args, Cancellation, Raises: as `warm_up`."""
    if not _is_short(draft[0]):
        async with _open_sequence(*draft) as sequence:
            await _time_steps(sequence, draft[1], prices)


def _is_short(model: Model) -> bool:
    return model.context_length is not None and model.context_length < MIN_CONTEXT_LENGTH


async def _measure(target: tuple[Model, Worker], draft: tuple[Model, Worker] | None, prices: Prices) -> None:
    target_worker = target[1]
    async with _open_sequence(*target) as target_sequence, AsyncExitStack() as stack:
        await _warm(target_sequence, target_worker, TARGET_WIDTHS)
        if draft is not None:
            draft_sequence = await stack.enter_async_context(_open_sequence(*draft))
            await _time_steps(draft_sequence, draft[1], prices)
        await _time_passes(target_sequence, target_worker, NUM_PASSES_ALONE * TARGET_WIDTHS, prices)
        if draft is not None:
            await _time_side_by_side((target_sequence, target_worker), (draft_sequence, draft[1]), prices)
    async with _open_sequence(*target) as target_sequence:
        await _time_wide_passes(target[0], target_sequence, target_worker, prices)
    if not prices.plain_decode_s.is_known:
        async with _open_sequence(*target) as target_sequence:
            await _time_plain_decoding(target[0], target_sequence, target_worker, prices)


async def _warm(sequence: CachedSequence, worker: Worker, widths: tuple[int, ...]) -> None:
    """Compute a pass of each width, untimed: it compiles kernels, also those of sampling, and allocates buffers."""
    for width in widths:
        await worker.run(_pass(sequence, width, samples=True))


async def _time_steps(sequence: CachedSequence, worker: Worker, prices: Prices) -> None:
    await _warm(sequence, worker, DRAFT_WIDTHS)
    for width in NUM_PASSES_ALONE * DRAFT_WIDTHS:
        job = _pass(sequence, width)
        await worker.run(job)
        prices.observe_draft_step(width, job.began, job.ended, beside_target=False)


async def _time_side_by_side(
    target: tuple[CachedSequence, Worker], draft: tuple[CachedSequence, Worker], prices: Prices
) -> None:
    is_over = False
    errors: list[JobError] = []  # collected here, since the nursery would wrap them in an exception group

    async def time_draft_steps() -> None:
        sequence, worker = draft
        try:
            for _ in range(MAX_STEPS_BESIDE_TARGET):
                if is_over:
                    return
                job = _pass(sequence, 1)
                await worker.run(job)
                prices.observe_draft_step(1, job.began, job.ended, beside_target=True)
        except JobError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(time_draft_steps)
        sequence, worker = target
        try:
            await _time_passes(sequence, worker, TARGET_WIDTHS, prices)
        except JobError as error:
            errors.append(error)
        is_over = True
    if errors:
        raise errors[0]


async def _time_wide_passes(model: Model, sequence: CachedSequence, worker: Worker, prices: Prices) -> None:
    """Time passes of the target over more and more tokens, until they are expensive or the context ends."""
    width, num_fed = TARGET_WIDTHS[-1], NUM_TEXT_TOKENS
    for wider in WIDE_WIDTHS:
        num_fed += (1 + NUM_PASSES_ALONE) * wider
        is_dear = prices.verify(width) > MAX_COST_BEFORE_WIDER * prices.verify(1)
        if is_dear or (model.context_length is not None and model.context_length < num_fed):
            return
        width = wider
        await worker.run(_pass(sequence, width))  # not timed, as above
        await _time_passes(sequence, worker, NUM_PASSES_ALONE * (width,), prices)


async def _time_passes(sequence: CachedSequence, worker: Worker, widths: tuple[int, ...], prices: Prices) -> None:
    for width in widths:
        job = _pass(sequence, width)
        await worker.run(job)
        prices.observe_verify_pass(width, job.began, job.ended)


async def _time_plain_decoding(model: Model, sequence: CachedSequence, worker: Worker, prices: Prices) -> None:
    row = Row(sequence, _OPENED, LogitsPipeline(_OPENED), FeedPlan(NUM_TEXT_TOKENS, (0,)))
    step = partial(Passes(model).steps, [row], [Share(0, 0, 1)], NUM_PLAIN_STEPS, goes_ahead=True)
    ended_s: list[float] = []

    def note(job: Job[Any], results: Sequence[RowResult], goes_on: bool) -> None:
        if (error := results[0].error) is not None:
            raise job_error(job, error)
        ended_s.append(job.ended)

    await worker.run_steps(Steps("warm-up", step, note, num_tokens=1))
    for before_s, after_s in pairwise(ended_s):  # the first step is not a pass ahead
        prices.plain_decode_s.observe(after_s - before_s)


@asynccontextmanager
async def _open_sequence(model: Model, worker: Worker) -> AsyncIterator[CachedSequence]:
    """A sequence that holds `NUM_TEXT_TOKENS` tokens; closed on leaving."""
    sequence = await worker.run(Job("warm-up", partial(model.open_sequence, beside_another=True)))
    try:
        if isinstance(sequence, FeatureInput):
            await worker.run(Job("warm-up", partial(sequence.give_nothing, MAX_TOKENS)))
        await worker.run(Job("warm-up", partial(sequence.feed, (0,) * NUM_TEXT_TOKENS, 0), None, NUM_TEXT_TOKENS))
        yield sequence
    finally:
        with trio.CancelScope(shield=True):
            await worker.run(Job("warm-up", sequence.close))


def _pass(sequence: CachedSequence, width: int, *, samples: bool = False) -> Job[None]:
    """A job that feeds `width` tokens and computes the logits of each, and samples from them if `samples`."""

    def call() -> None:
        rows = sequence.feed((0,) * width, width)
        assert rows is not None
        if samples:
            noisy = scores(rows, TEMPERATURE, [(0, i) for i in range(width)], rows.shape[1])
            drawn = draw(distribution(rows[0], TEMPERATURE), key_for(0, Purpose.DRAFT, 0, 0))
            mx.eval(rows, *likeliest(noisy), drawn)
        else:
            mx.eval(rows)

    # The statistics of sessions do not count jobs of this kind.
    return Job("warm-up", call, None, width)
