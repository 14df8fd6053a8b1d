"""Resting rounds between rounds with a proposal, on real models and real caches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.nn as nn
import pytest
from delays import RestingPolicy
from models import gemma3_text, greedy, llama, mamba, near, prompt_of
from sweeps import sweep

import runtime

NUM_TOKENS = 48


@pytest.mark.slow
@sweep("turns", [(True, False, False, False), (False, False, True, True, False), (False, False, True, False)])
@sweep(
    ("build", "rewind"),
    [(llama, "auto"), (llama, "none"), (mamba, "auto"), (mamba, "none"), (lambda: gemma3_text(window=16), "auto")],
)
async def test_the_greedy_text_goes_on_through_every_rest(
    build: Callable[[], nn.Module], rewind: str, turns: tuple[bool, ...]
) -> None:
    target, prompt = build(), prompt_of(9)
    async with runtime.open((target, None), (near(target, noise=0.03), None), rewind=rewind) as rt:
        draft: Any = rt._draft
        draft._make_policy = lambda settings, prices: RestingPolicy(settings.lookahead, turns=itertools.cycle(turns))
        completion = await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead=3)
    statistics = completion.statistics
    assert [token.id for token in completion.tokens] == greedy(target, prompt, NUM_TOKENS)
    assert statistics.draft_failures == 0
    # Both kinds of round occur.
    assert 0 < statistics.resting_rounds < statistics.rounds
    assert statistics.proposed > 0
