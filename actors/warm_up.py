"""A first measurement of the prices, before anybody waits for a token.

It takes a dozen forward passes of the target. What it finds is where the averages of `protocol.prices` begin.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import trio

from actors.model import Line, Model
from actors.worker import Job, Worker
from protocol.prices import Prices

TEXT = 8  # tokens before the first pass
WIDTHS = (1, 4, 1, 4)


async def warm_up(target: tuple[Model, Worker], draft: tuple[Model, Worker], prices: Prices) -> None:
    """Time both models, each alone and both at once.

    Cancellation: strikes after the passes that are running.

    Raises: JobError: a model failed.
    """
    (target_model, target_worker), (draft_model, draft_worker) = target, draft
    ours = await target_worker.run(Job("open", partial(_begin, target_model)))
    theirs = await draft_worker.run(Job("open", partial(_begin, draft_model)))
    # The first pass of each width builds kernels and buffers.
    for width in sorted(set(WIDTHS)):
        await target_worker.run(_pass(ours, width))
        await draft_worker.run(_pass(theirs, width))
    for width in WIDTHS:
        job = _pass(ours, width)
        await target_worker.run(job)
        prices.verified(width, job.began, job.ended)
        if width == 1:
            prices.plain.observe(job.seconds)
    for width in WIDTHS:
        job = _pass(theirs, width)
        await draft_worker.run(job)
        prices.drafted(width, job.began, job.ended, beside=False)
    await _side_by_side((ours, target_worker), (theirs, draft_worker), prices)
    await target_worker.run(Job("close", ours.close))
    await draft_worker.run(Job("close", theirs.close))


async def _side_by_side(ours: tuple[Line, Worker], theirs: tuple[Line, Worker], prices: Prices) -> None:
    """Passes of the target, with a drafter that never rests beside them."""
    is_over = False

    async def draft_on() -> None:
        line, worker = theirs
        while not is_over:
            job = _pass(line, 1)
            await worker.run(job)
            prices.drafted(1, job.began, job.ended, beside=True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(draft_on)
        line, worker = ours
        for width in WIDTHS:
            job = _pass(line, width)
            await worker.run(job)
            prices.verified(width, job.began, job.ended)
        is_over = True


def _begin(model: Model) -> Line:
    line = model.open_line(beside_another=True)
    line.feed((0,) * TEXT, 0)
    return line


def _pass(line: Line, width: int) -> Job[None]:
    def call() -> None:
        mx.eval(line.feed((0,) * width, width))

    # Of a kind that is not counted for any session.
    return Job("warm-up", call, None, width)
