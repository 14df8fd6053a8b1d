"""`draft="ngram"` on real models and threads: mlx-lm's greedy text, and no second thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
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


async def test_there_is_no_thread_but_the_targets() -> None:
    async with runtime.open((family("llama"), None), "ngram") as rt:
        seen = [outrider_thread_names() async for _ in rt.stream(PROMPTS["a phrase, again and again"], max_tokens=12)]
        statistics = rt.statistics()
    assert seen == [["outrider-target"]] * 12
    assert statistics.draft_busy == 0
    assert outrider_threads() == []


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
