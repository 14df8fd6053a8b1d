"""Timing of generated tokens, the same for every contender.

A run is timed from the end of its first round to its last token. The tokens of the first round take no time of their
own, and their number depends on the contender. Prefill is left out with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import attrs
import outcome
import trio

from actors.workers.worker import Job, Worker


@attrs.frozen
class TimedToken:
    """A generated token, whether the draft proposed it, and when it was ready, in seconds on `time.perf_counter`."""

    token: int
    from_draft: bool
    at: float


def first_timed(tokens: Sequence[TimedToken]) -> tuple[int, float]:
    """Index of the first token after the first round, which the target's own first token ends, and the time of that."""
    end_of_first = next((i for i, token in enumerate(tokens) if not token.from_draft), len(tokens) - 1)
    return end_of_first + 1, tokens[end_of_first].at


def count_rounds(from_draft: Sequence[bool], num_draft_tokens: int, max_tokens: int) -> tuple[int, int]:
    """Numbers of rounds and of proposed tokens in mlx-lm's speculative decoding, derived from the token flags.

    A round ends with a token of the target's own or with the text. It proposes `num_draft_tokens` tokens, or as many
    as `max_tokens` leaves.
    """
    rounds = proposed = 0
    is_new_round = True
    for i, drafted in enumerate(from_draft):
        if is_new_round:
            rounds += 1
            proposed += min(max_tokens - i, num_draft_tokens)
        is_new_round = not drafted
    return rounds, proposed


# --- on a worker's thread -------------------------------------------------------------------------


async def take_until_cancelled(worker: Worker, generate: Callable[[], Iterator[tuple[int, bool]]]) -> list[TimedToken]:
    """All tokens of a generator with their times; the generator is made, runs and is closed on a worker's thread.

    Raises: JobError: the generator raised.

    Cancellation: takes effect after the next token.
    """
    stop = trio.Event()

    async def stop_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            stop.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_when_cancelled)
        # Captured, since the nursery would wrap an exception in a group.
        taken = await outcome.acapture(worker.run, Job("decode", partial(_take, generate, stop)))
        nursery.cancel_scope.cancel()
    return taken.unwrap()


def _take(generate: Callable[[], Iterator[tuple[int, bool]]], stop: trio.Event) -> list[TimedToken]:
    tokens = []
    # Closed on this thread: mlx-lm's generators hold a stream of the thread that ran them.
    with closing(cast(Any, generate())) as steps:
        for token, from_draft in steps:
            tokens.append(TimedToken(token, from_draft, time.perf_counter()))
            if stop.is_set():
                break
    return tokens
