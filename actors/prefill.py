"""Prefill: the prompt goes into a cache, in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from actors.model import Line
from actors.worker import Job, Worker
from protocol.held import Held
from protocol.messages import Open

# Tokens before the end of a prompt at which it is pinned as well: what asks for an answer there, such as a tag that
# begins a thought, is left out where a template repeats the answer.
BEFORE_THE_END = 16


async def prefill(worker: Worker, line: Line, held: Held, opened: Open) -> None:
    """Feed the prompt but for its last token, whose logits the first round wants, and what is held already.

    Cancellation: strikes between two chunks. A chunk is a job, so that is also where other sessions
    have their turn.
    """
    most = len(opened.prompt) - 1
    pins = {most - BEFORE_THE_END, most} if opened.settings.reuse_prefix and line.needs_pins else set()
    for end in _ends(len(held), most, opened.settings.prefill_step_size, pins):
        plan = held.plan(opened.prompt[:end], num_logits=0)
        call = partial(_read, line, plan.feed, end in pins)
        await worker.run(Job("prefill", call, opened.session, len(plan.feed)))
        held.follow(plan)


def _ends(begin: int, most: int, size: int, pins: set[int]) -> Iterator[int]:
    """Where the chunks end: at multiples of their size, wherever the first begins, at pins, and at the end.

    With a quantised cache it matters where: it is quantised at the end of a chunk.
    """
    ends = {*range((begin // size + 1) * size, most, size), most, *pins}
    yield from sorted(end for end in ends if end > begin)


def _read(line: Line, tokens: tuple[int, ...], pin: bool) -> None:
    line.feed(tokens, 0)
    if pin:
        line.pin()
