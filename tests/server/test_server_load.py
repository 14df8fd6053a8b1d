"""A hundred clients at a real server: what each was told in full is right, and afterwards nothing is left of them."""

from __future__ import annotations

import load
import pytest
import trio
from polling import until_in_trio

from runtime.loading.demo import DEMO_DRAFT

# Each comes once, and some twice.
NUM_CLIENTS = 100
SECONDS = 2

# What each model may keep of texts that are over, so little that it cannot hide what is left of requests.
PREFIX_CACHE_BYTES = 8 * 2**20

# How much the server may grow: the caches of both models, and 48 MiB. Of those, the first two seconds take up to 36,
# depending on the machine; after that it does not grow, in 4 s as in 16.
KEPT_BYTES = 2 * PREFIX_CACHE_BYTES + 48 * 2**20

# Prompts are tokenised in a thread, one at a time, and a client that leaves meanwhile leaves its thread to its work.
PASSING_THREADS = 16


@pytest.mark.slow
async def test_clients_that_come_and_go_at_will_are_answered_rightly_and_leave_nothing() -> None:
    with trio.fail_after(900):
        # With the demo target, prompts would be read most of the time.
        async with load.served("--prefix-cache-bytes", str(PREFIX_CACHE_BYTES), target=DEMO_DRAFT) as server:
            num_threads, num_files, resident_bytes = server.num_threads, server.num_files, server.resident_bytes
            seen = await load.storm(server, seconds=SECONDS, num_clients=NUM_CLIENTS, seed=1, num_requests=8)
            await load.nobody_left(server)
            assert seen.problems == []
            assert seen.texts
            assert set(seen.statuses) <= {200, 429}
            assert await load.wrong_texts(server, seen) == []
            assert seen.max_resident_bytes <= resident_bytes + KEPT_BYTES
            assert seen.max_threads <= num_threads + PASSING_THREADS
            # The connection over which the server was asked just now may not have been heard to end.
            await until_in_trio(lambda: server.num_files <= num_files + 1)
            assert server.complaints == []
