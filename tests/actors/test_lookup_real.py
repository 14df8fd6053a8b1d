"""`draft="ngram"` on real models and threads: mlx-lm's greedy text, and no second thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
import trio
from completions import ids
from models import gemma2, gemma3_text, greedy, llama, mamba, prompt_of, qwen3, sliding_llama
from our_threads import outrider_thread_names, outrider_threads
from sweeps import sweep

import runtime

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "sliding windows": functools.partial(gemma3_text, window=16),
    "one sliding window": functools.partial(sliding_llama, window=16),
    # With this seed it repeats itself.
    "recurrent": functools.partial(mamba, 6),
}
PROMPTS = {"one token": [7], "a phrase, again and again": prompt_of(9) * 4, "nothing twice": list(range(3, 33))}
LOOKAHEADS: list[Any] = [1, 3, 8, "auto"]
NUM_TOKENS = 50


@functools.cache
def family(name: str) -> nn.Module:
    return FAMILIES[name]()


@functools.cache
def family_text(name: str, prompt: tuple[int, ...]) -> list[int]:
    return greedy(family(name), prompt, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_every_lookahead_gives_the_greedy_text(name: str) -> None:
    async with runtime.open((family(name), None), "ngram") as rt:
        for i, prompt in enumerate(PROMPTS.values()):
            for lookahead in LOOKAHEADS[i % 2 :: 2]:
                completion = await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead=lookahead)
                assert ids(completion) == family_text(name, tuple(prompt)), f"lookahead {lookahead}, prompt {prompt}"
                statistics = completion.statistics
                assert statistics.accepted == sum(token.from_draft for token in completion.tokens)
                assert statistics.n1_rounds == statistics.draft_failures == 0
        statistics = rt.statistics()
    assert 0 < statistics.accepted < statistics.proposed


async def test_a_prompt_may_be_long_enough_for_several_chunks_and_a_window() -> None:
    target, prompt = family("sliding windows"), prompt_of(20) * 3
    async with runtime.open((target, None), "ngram") as rt:
        completion = await rt.generate(prompt, max_tokens=40, prefill_step_size=7, lookahead=4)
    assert ids(completion) == greedy(target, prompt, 40)


async def test_there_is_no_thread_but_the_targets() -> None:
    async with runtime.open((family("llama"), None), "ngram") as rt:
        seen = [outrider_thread_names() async for _ in rt.stream(PROMPTS["a phrase, again and again"], max_tokens=12)]
        statistics = rt.statistics()
    assert seen == [["outrider-target"]] * 12
    assert statistics.draft_busy == 0
    assert outrider_threads() == []


async def test_with_a_seed_the_text_is_the_one_without_lookups() -> None:
    prompt = PROMPTS["a phrase, again and again"]
    async with runtime.open((family("llama"), None)) as plain, runtime.open((family("llama"), None), "ngram") as rt:
        for seed, temperature in enumerate((0.5, 1.0, 0.5)):
            settings: dict[str, Any] = {"max_tokens": 40, "temperature": temperature}
            expected = await plain.generate(prompt, seed=seed, **settings)
            for lookahead in (2, "auto"):
                assert ids(await rt.generate(prompt, seed=seed, lookahead=lookahead, **settings)) == ids(expected)
        assert rt.statistics().proposed > 0


async def test_under_the_rejection_rule_texts_come_and_some_of_what_was_looked_up_stands() -> None:
    prompt = PROMPTS["a phrase, again and again"]
    async with runtime.open((family("llama"), None), "ngram") as rt:
        texts = [
            await rt.generate(prompt, max_tokens=40, temperature=0.3, acceptance="rejection", seed=seed, lookahead=2)
            for seed in (1, 1, 2)
        ]
        statistics = rt.statistics()
    assert ids(texts[0]) == ids(texts[1]) != ids(texts[2])
    assert 0 < statistics.accepted < statistics.proposed


async def test_several_streams_at_once_and_one_that_is_left() -> None:
    prompts = [prompt_of(5, seed=seed) * 3 for seed in range(3)]
    async with runtime.open((family("qwen3"), None), "ngram") as rt:
        async for _ in rt.stream(prompts[0], max_tokens=30):
            break
        texts = await rt.generate_many(prompts, max_tokens=30)
        while rt.num_streams:  # a finished stream is removed in the next turn of the event loop
            await trio.lowlevel.checkpoint()
    assert [ids(text) for text in texts] == [greedy(family("qwen3"), prompt, 30) for prompt in prompts]


# --- invalid drafters -----------------------------------------------------------------------------


@sweep("target, draft, says", [
    ("ngram", "ngram", 'target must be a model here, and "ngram" has none'),
    *((family("llama"), draft, "ngram' does not exist") for draft in ("./ngram", Path("ngram"), "models/with/ngram")),
])  # fmt: skip
async def test_prompt_lookup_is_no_target_and_a_path_of_that_name_is_a_path(target: Any, draft: Any, says: str) -> None:
    with pytest.raises((runtime.SettingsError, runtime.ModelError), match=says):
        async with runtime.open(target if target == "ngram" else (target, None), draft):
            pytest.fail("opened")
    assert outrider_threads() == []
