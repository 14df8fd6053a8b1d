"""A runtime with a trained drafter, and checks that its texts are the target's, whatever is drafted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from models import greedy

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.trained.drafter_model import TrainedDrafter
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job
from runtime.engine.running import running

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
NUM_TOKENS = 40


@asynccontextmanager
async def drafted(folder: Path, built: Any, **options: Any) -> AsyncIterator[Any]:
    """A runtime of a target and the drafter in a folder."""
    async with ThreadWorker("target") as target_worker, ThreadWorker("draft") as draft_worker:
        target = await target_worker.run(Job("load", lambda: MLXModel(built, CacheOptions())))
        drafter = await draft_worker.run(Job("load", lambda: TrainedDrafter(folder, built, target.vocab_size)))
        target.record_features(drafter.feature_layers)
        with target.evaluating_layers():
            async with running((target, target_worker), (drafter, draft_worker), **options) as rt:
                yield rt


async def check_greedy(rt: Any, built: Any, lookahead: Any) -> Any:
    """Compare greedy texts with those of the target alone. Returns: the statistics of the last one."""
    for prompt in PROMPTS:
        stream = rt.stream(prompt, max_tokens=NUM_TOKENS, lookahead=lookahead, ignore_eos=True)
        assert [token.id async for token in stream] == greedy(built, prompt, NUM_TOKENS)
        statistics = stream.statistics()
        assert statistics.draft_failures == 0
        if lookahead != "auto":
            assert statistics.proposed > 0
    return statistics


async def check_seeded(rt: Any, lookahead: Any) -> None:
    """Compare texts at a temperature, several streams at once, with those of plain decoding, one after the other."""
    settings = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 5, "acceptance": "match", "ignore_eos": True}
    plain = [await rt.generate(prompt, lookahead=0, **settings) for prompt in PROMPTS]
    completions = await rt.generate_many(PROMPTS, lookahead=lookahead, **settings)
    for completion, expected in zip(completions, plain, strict=True):
        assert [token.id for token in completion.tokens] == [token.id for token in expected.tokens]
        assert completion.statistics.proposed > 0
        assert completion.statistics.draft_failures == 0
