"""The demo target and its trained drafter, with real features and drafts, in simulated time: the drafter works while
the target verifies, and what it drafted ahead is proposed.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripted import priced
from simulated_worker import SimulatedWorker

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel, load
from actors.trained.drafter_model import TrainedDrafter
from protocol.trace import Instant, Span
from runtime.engine.events import Events
from runtime.engine.opening import running


@pytest.mark.slow
async def test_a_real_trained_drafter_drafts_inside_the_targets_passes(autojump_clock: Any) -> None:
    built, tokenizer = load(runtime.DEMO_TARGET)
    target = MLXModel(built, CacheOptions())
    drafter = TrainedDrafter(runtime.DEMO_TRAINED_DRAFT, built, target.vocab_size)
    target.record_features(drafter.feature_layers)
    seen, events = [], Events()
    events.listen(seen.append)
    workers = [SimulatedWorker(role, priced(draft=1.0, verify=8.0), events) for role in ("target", "draft")]
    prompt = tokenizer.encode("def quicksort(items):\n    if len(items)")
    with target.evaluating_layers():
        async with running((target, workers[0]), (drafter, workers[1]), events=events) as rt:
            completion = await rt.generate(prompt, max_tokens=40, lookahead=3, ignore_eos=True)
            plain = await rt.generate(prompt, max_tokens=40, lookahead=0, ignore_eos=True)
    assert [token.id for token in completion.tokens] == [token.id for token in plain.tokens]
    spans = [event for event in seen if isinstance(event, Span)]
    verifies = [span for span in spans if span.kind == "verify"]
    drafts = [span for span in spans if span.kind == "draft"]
    inside = [draft for draft in drafts if any(v.began <= draft.began and draft.ended <= v.ended for v in verifies)]
    assert len(inside) > len(drafts) / 4
    assert [event for event in seen if isinstance(event, Instant) and event.kind == "hit"] != []
    statistics = completion.statistics
    assert statistics.draft_failures == 0
    assert statistics.fresh_acceptance is not None
    assert statistics.stale_acceptance is not None
