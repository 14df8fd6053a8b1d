"""The course of a distillation: on a thread of its own, so that a cancellation takes effect between two batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job, JobError
from protocol.errors import OutriderError
from runtime.distill.distillation import Distillation, load_target
from runtime.distill.evaluation import Evaluation
from runtime.distill.options import DistillOptions
from runtime.loading.model_files import load_error

T = TypeVar("T")


async def distill(
    options: DistillOptions, *, on_progress: Callable[[str], None], on_evaluation: Callable[[Evaluation], None]
) -> None:
    """Train a drafter until it learns nothing more, and write it to `options.out`.

    Cancellation: ends the training after the current batch, and saves its state: the same call continues from there.
    Raises: ModelError, SettingsError: see `Distillation`; or a model cannot be loaded, or the folder not be written.
    """
    async with ThreadWorker("target") as worker:

        async def run(call: Callable[[], T]) -> T:
            try:
                return await worker.run(Job("load", call))
            except JobError as error:
                if isinstance(error.__cause__, OutriderError):
                    raise error.__cause__ from None
                raise

        on_progress(f"loading {Path(options.target).name}")
        try:
            target, tokenizer = await run(partial(load_target, options.target))
        except JobError as error:
            raise load_error("target", options.target, error.__cause__) from error.__cause__
        on_progress("reading texts")
        work = await run(partial(Distillation, options, target, tokenizer))
        began, missing_then = trio.current_time(), 0.0
        while num_missing := await run(work.continue_some):
            missing_then = missing_then or num_missing
            done = missing_then - num_missing
            left = f", about {_minutes(num_missing * (trio.current_time() - began) / done)} left" if done else ""
            on_progress(f"the target is writing: {math.ceil(num_missing):,} windows left{left}")
        on_progress("preparing the drafter")
        goes_on = await run(work.begin)

        async def evaluate() -> None:
            await run(work.begin_evaluation)
            while (share := work.held_out_share) < 1.0:
                on_progress(f"drafting for held-out text: {share:.0%}")
                await run(work.draft)
            on_evaluation(await run(work.evaluate))

        try:
            if options.init is not None and not goes_on:
                await evaluate()
            while not work.is_over:
                on_progress(_learning(work))
                await run(work.learn)
                if work.is_evaluation_due:
                    await evaluate()
            await run(work.end_batch)
            if work.has_learnt_since:
                await evaluate()
            await run(work.end)
        finally:
            # An evaluation has saved the state already.
            if work.has_learnt_since:
                with trio.CancelScope(shield=True):
                    await run(work.save)


def _learning(work: Distillation) -> str:
    progress = work.training.progress
    said = f"learning: batch {progress.num_batches + 1:,}"
    if work.batch_share > 0.0:
        said += f" ({work.batch_share:.0%} of it)"
    if progress.num_since:
        loss = progress.loss_since / progress.num_since
        rate = progress.num_tokens / progress.seconds
        said += f", {rate:,.0f} tokens/s ({rate * 3600 / 1e6:,.2f} million an hour), loss {loss:.3f}"
    return said if math.isinf(work.seconds_left) else f"{said}, {_minutes(work.seconds_left)} left"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min"
