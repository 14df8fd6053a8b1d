"""Prefill: the prompt goes into a cache, in chunks."""

from __future__ import annotations

from functools import partial

from actors.model import Line
from actors.worker import Job, Worker
from protocol.held import Held
from protocol.messages import Open


async def prefill(worker: Worker, line: Line, held: Held, opened: Open) -> None:
    """Feed the prompt but for its last token, whose logits the first round wants.

    Cancellation: strikes between two chunks. A chunk is a job, so that is also where other sessions
    have their turn.
    """
    most = len(opened.prompt) - 1
    size = opened.settings.prefill_step_size
    for begin in range(0, most, size):
        plan = held.plan(opened.prompt[: min(begin + size, most)], num_logits=0)
        await worker.run(Job("prefill", partial(line.feed, plan.feed, 0), opened.session, len(plan.feed)))
        held.follow(plan)
