"""What passes without drafts say about the price of a plain round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.target.pass_prices import PassPrices
from actors.workers.worker import Job
from protocol.prices import Prices

PASS_S = 4.0


@pytest.mark.parametrize("num_texts", [1, 3])
def test_the_first_and_the_last_pass_that_were_launched_ahead_do_not_count(num_texts: int) -> None:
    """A job may compute the pass that it launches, as on a CPU: the first has two passes, and the last one has none."""
    worker: Any = SimpleNamespace(busy_seconds=0.0)
    sessions: Any = [SimpleNamespace(has_shared=True)] * num_texts
    prices, now_s = Prices(num_texts=num_texts), 0.0
    learning = PassPrices(prices, worker)

    def run(seconds: float, *, is_ahead: bool) -> None:
        nonlocal now_s
        job: Job[None] = Job("verify", lambda: None)
        job.began, job.ended = now_s, now_s + seconds
        now_s, worker.busy_seconds = job.ended, worker.busy_seconds + seconds
        learning.learn_plain(job, sessions, num_texts, num_texts, is_ahead=is_ahead)

    for _ in range(3):
        run(2 * PASS_S, is_ahead=True)
        for _ in range(5):
            run(PASS_S, is_ahead=True)
        run(0.0, is_ahead=False)
    assert prices.plain_round_s == PASS_S
