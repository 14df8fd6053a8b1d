"""Three real models of which two fit in memory, over HTTP: the right texts, and nothing that grows."""

from __future__ import annotations

import pytest
import switching
import trio
from load import nobody_left
from raw_http import ask, request

NUM_REQUESTS = 80
NUM_CLIENTS = 6

# Requests after which the server's size counts, and how much it may grow from then on: buffers of MLX for one model.
WARM_UP = 30
GROWTH_BYTES = 24 * 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> switching.Models:
    return switching.save_models(tmp_path_factory.mktemp("switching"))


@pytest.mark.slow
async def test_three_models_answer_over_http_each_in_its_turn(models: switching.Models) -> None:
    async with switching.served(models) as server:
        for name in (*switching.NAMES, switching.NAMES[0]):
            prompt = switching.PROMPTS[0]
            body = {"model": name, "prompt": prompt, "max_tokens": switching.NUM_TOKENS, "ignore_eos": True}
            answer = await ask(server.port, request("POST", "/v1/completions", body))
            assert (answer.status, answer.text) == (200, models.texts[name, prompt])
        assert switching.num_loads(server) == 4
        listed = (await ask(server.port, request("GET", "/v1/models"))).json()["data"]
        assert [each["id"] for each in listed] == list(switching.NAMES)
        assert sum(each["state"] == "loaded" for each in listed) == 2
        assert await switching.memory_bytes(server) <= models.memory_limit
        assert switching.complaints(server) == []


@pytest.mark.slow
async def test_clients_that_switch_and_leave_get_the_right_texts_and_leave_nothing(models: switching.Models) -> None:
    with trio.fail_after(600):
        async with switching.served(models) as server:
            seen = await switching.switch(
                server, models, num_clients=NUM_CLIENTS, goes_on=lambda number: number < NUM_REQUESTS, seed=1
            )
            await nobody_left(server)
            assert seen.problems == []
            assert switching.num_loads(server) > 6
            assert max(seen.resident_bytes[WARM_UP:]) <= max(seen.resident_bytes[:WARM_UP]) + GROWTH_BYTES
            # A model is loaded beside at most two others, and caches of running texts come on top.
            assert max(seen.memory_bytes) <= 2 * models.memory_limit
            assert switching.complaints(server) == []
