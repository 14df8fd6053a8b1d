"""Warm-up: the first measurement of the prices, by some thirty passes of the target and up to sixty draft steps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import attrs
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
# How often each width is timed alone: once where passes take so long, in seconds for one of each width, that little
# else can disturb their times, and that people would wait for them.
NUM_PASSES_ALONE, LONG_S = 2, 1.0
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
        async with _opened(*draft, prices) as drafter:
            await drafter.time_steps()


def _is_short(model: Model) -> bool:
    return model.context_length is not None and model.context_length < MIN_CONTEXT_LENGTH


async def _measure(of_target: tuple[Model, Worker], draft: tuple[Model, Worker] | None, prices: Prices) -> None:
    async with _opened(*of_target, prices) as target, AsyncExitStack() as stack:
        await target.warm(TARGET_WIDTHS)
        if draft is not None:
            drafter = await stack.enter_async_context(_opened(*draft, prices))
            await drafter.time_steps()
        for _ in range(NUM_PASSES_ALONE):
            if await target.time_passes(TARGET_WIDTHS) > LONG_S:
                break
        if not prices.plain_decode_s.is_known:
            await target.time_plain_decoding()
        if draft is not None:
            await _time_side_by_side(target, drafter)
    if not _is_dear(TARGET_WIDTHS[-1], prices):
        async with _opened(*of_target, prices) as target:
            await target.time_wide_passes()


def _is_dear(width: int, prices: Prices) -> bool:
    """Whether no wider pass than one of this width is timed."""
    return prices.verify(width) > MAX_COST_BEFORE_WIDER * prices.verify(1)


@attrs.frozen
class _Timed:
    """A model on its worker, a sequence that holds `NUM_TEXT_TOKENS` tokens, and the prices that its passes show."""

    model: Model
    worker: Worker
    sequence: CachedSequence
    prices: Prices

    async def run(self, width: int, *, samples: bool = False) -> Job[None]:
        """Feed `width` tokens and compute the logits of each, and sample from them if `samples`."""

        def call() -> None:
            rows = self.sequence.feed((0,) * width, width)
            assert rows is not None
            if samples:
                noisy = scores(rows, TEMPERATURE, [(0, i) for i in range(width)], rows.shape[1])
                drawn = draw(distribution(rows[0], TEMPERATURE), key_for(0, Purpose.DRAFT, 0, 0))
                mx.eval(rows, *likeliest(noisy), drawn)
            else:
                mx.eval(rows)

        job = Job("warm-up", call, None, width)  # the statistics of sessions do not count jobs of this kind
        await self.worker.run(job)
        return job

    async def warm(self, widths: tuple[int, ...]) -> None:
        """Compute a pass of each width, untimed: it compiles kernels, also those of sampling, and allocates buffers."""
        for width in widths:
            await self.run(width, samples=True)

    async def time_steps(self) -> None:
        await self.warm(DRAFT_WIDTHS)
        for width in NUM_PASSES_ALONE * DRAFT_WIDTHS:
            job = await self.run(width)
            self.prices.observe_draft_step(width, job.began, job.ended, beside_target=False)

    async def time_passes(self, widths: tuple[int, ...]) -> float:
        """Returns: their seconds."""
        total_s = 0.0
        for width in widths:
            job = await self.run(width)
            self.prices.observe_verify_pass(width, job.began, job.ended)
            total_s += job.seconds
        return total_s

    async def time_wide_passes(self) -> None:
        """Time passes over more and more tokens, until they are expensive or the context ends."""
        width, num_fed, context_length = TARGET_WIDTHS[-1], NUM_TEXT_TOKENS, self.model.context_length
        for wider in WIDE_WIDTHS:
            num_fed += (1 + NUM_PASSES_ALONE) * wider
            if _is_dear(width, self.prices) or (context_length is not None and context_length < num_fed):
                return
            width = wider
            await self.run(width)  # not timed, as above
            await self.time_passes(NUM_PASSES_ALONE * (width,))

    async def time_plain_decoding(self) -> None:
        row = Row(self.sequence, _OPENED, LogitsPipeline(_OPENED), FeedPlan(self.sequence.length, (0,)))
        # One step more, which launches no pass, so that none is left for those that are timed later.
        step = partial(Passes(self.model).steps, [row], [Share(0, 0, 1)], NUM_PLAIN_STEPS + 1, goes_ahead=False)
        ended_s: list[float] = []

        def note(job: Job[Any], results: Sequence[RowResult], goes_on: bool) -> None:
            if (error := results[0].error) is not None:
                raise job_error(job, error)
            ended_s.append(job.ended)

        await self.worker.run_steps(Steps("warm-up", step, note, num_tokens=1))
        for before_s, after_s in pairwise(ended_s[:NUM_PLAIN_STEPS]):  # the first step is not a pass ahead
            self.prices.plain_decode_s.observe(after_s - before_s)


async def _time_side_by_side(target: _Timed, drafter: _Timed) -> None:
    is_over = False
    errors: list[JobError] = []  # collected here, since the nursery would wrap them in an exception group

    async def time_draft_steps() -> None:
        try:
            for _ in range(MAX_STEPS_BESIDE_TARGET):
                if is_over:
                    return
                job = await drafter.run(1)
                drafter.prices.observe_draft_step(1, job.began, job.ended, beside_target=True)
        except JobError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(time_draft_steps)
        try:
            await target.time_passes(TARGET_WIDTHS)
        except JobError as error:
            errors.append(error)
        is_over = True
    if errors:
        raise errors[0]


@asynccontextmanager
async def _opened(model: Model, worker: Worker, prices: Prices) -> AsyncIterator[_Timed]:
    sequence = await worker.run(Job("warm-up", partial(model.open_sequence, alongside_model=True)))
    try:
        if isinstance(sequence, FeatureInput):
            await worker.run(Job("warm-up", partial(sequence.give_nothing, MAX_TOKENS)))
        await worker.run(Job("warm-up", partial(sequence.feed, (0,) * NUM_TEXT_TOKENS, 0), None, NUM_TEXT_TOKENS))
        yield _Timed(model, worker, sequence, prices)
    finally:
        with trio.CancelScope(shield=True):
            await worker.run(Job("warm-up", sequence.close))
