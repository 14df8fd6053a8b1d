"""`draft="ngram"` on real models and threads: mlx-lm's greedy text, and no second thread."""

from pathlib import Path
from typing import Any

import pytest
from completions import open_and_close
from models import greedy, llama, mamba, prompt_of
from our_threads import outrider_thread_names, outrider_threads
from sweeps import sweep

import runtime

PROMPT = prompt_of(9) * 4


@sweep("lookahead", [3, "auto"])
async def test_the_text_is_the_greedy_one_and_there_is_no_thread_but_the_targets(lookahead: Any) -> None:
    # With this seed it repeats itself.
    target, seen, text = mamba(6), list[list[str]](), list[int]()
    async with runtime.open((target, None), "ngram") as rt:
        async for token in rt.stream(PROMPT, max_tokens=50, lookahead=lookahead):
            seen.append(outrider_thread_names())
            text.append(token.id)
        statistics = rt.statistics()
    assert text == greedy(target, PROMPT, 50)
    assert seen == [["outrider-target"]] * 50
    assert 0 < statistics.accepted <= statistics.proposed
    assert statistics.draft_busy == statistics.draft_failures == 0
    assert outrider_threads() == []


# --- invalid drafters -----------------------------------------------------------------------------
@sweep("target, draft, says", [
    ("ngram", "ngram", 'target must be a model here, and "ngram" has none'),
    *((llama(), draft, "ngram' does not exist") for draft in ("./ngram", Path("ngram"), "models/with/ngram")),
])  # fmt: skip
async def test_prompt_lookup_is_no_target_and_a_path_of_that_name_is_a_path(target: Any, draft: Any, says: str) -> None:
    with pytest.raises((runtime.SettingsError, runtime.ModelError), match=says):
        await open_and_close(target if target == "ngram" else (target, None), draft)
    assert outrider_threads() == []
