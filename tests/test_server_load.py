"""Two hundred clients at a real server: what each was told in full is right, and afterwards nothing is left of them."""

from __future__ import annotations

import load
import pytest
import trio

NUM_CLIENTS = 200
SECONDS = 30

# What a process takes beside what it holds goes up and down by so much.
SLACK_BYTES = 32 * 2**20

# Prompts are tokenised in a thread, one at a time, and a client that leaves meanwhile leaves its thread to its work.
PASSING_THREADS = 16


@pytest.mark.slow
async def test_clients_that_come_and_go_at_will_are_answered_rightly_and_leave_nothing() -> None:
    with trio.fail_after(900):
        async with load.served() as server:
            num_threads, num_files = server.num_threads, server.num_files
            seen = await load.storm(server, seconds=SECONDS, num_clients=NUM_CLIENTS, seed=1, num_requests=24)
            await load.nobody_left(server)
            assert seen.problems == []
            assert seen.texts
            assert set(seen.statuses) <= {200, 429}
            assert await load.wrong_texts(server, seen) == []
            # Lines are kept for later, up to a bound that is reached; threads of trio's, until they have been idle.
            first, second = load.halves(seen)
            most = [max(sample.resident_bytes for sample in half) for half in (first, second)]
            assert most[1] <= most[0] + SLACK_BYTES
            assert max(sample.num_threads for sample in second) <= num_threads + PASSING_THREADS
            # The connection over which the server was asked just now may not have been heard to end.
            assert server.num_files <= num_files + 1
            assert server.said[1:] == []
