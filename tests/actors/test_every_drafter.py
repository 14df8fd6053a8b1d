"""What every drafter keeps, whatever its kind: the text is the target's, and nothing is left behind.

In simulated time, with real models and caches. `tests/trained`, `tests/translated` and `tests/remote` have what only
some kinds do, and `tests/actors/test_greedy_parity.py` the families of models, on threads.
"""

from pathlib import Path
from typing import Any

import pytest
from drafted_runtime import NUM_TOKENS, PROMPTS, check_greedy, check_reuse, check_seeded
from every_drafter import KINDS, OFTEN, at_work
from models import greedy, prompt_of
from scripted import ids
from sweeps import sweep

from actors.mlx.cache_options import CacheOptions
from actors.target.drafter_link import DrafterLink

# A model of its own, one that was trained for the target, and none; the other ways to draft are slow tests.
QUICK = ("draft model", "eagle3", "lookup")
OFTEN_OR_SLOW = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in OFTEN]
every_implementation = sweep("kind", OFTEN_OR_SLOW)


@sweep(
    ("kind", "rewind"),
    [
        *((kind, "checkpoint") for kind in OFTEN),
        *(pytest.param(kind, "checkpoint", marks=pytest.mark.slow) for kind in KINDS if kind not in OFTEN),
        *(pytest.param(kind, "none", marks=pytest.mark.slow) for kind in OFTEN),
    ],
)
async def test_greedy_texts_are_the_targets_however_it_rewinds(kind, rewind, tmp_path, autojump_clock):
    async with at_work(kind, tmp_path, cache_options=CacheOptions(rewind)) as (rt, target):
        await check_greedy(rt, target, [3, "auto"])


@sweep(
    ("kind", "family"),
    [
        *((kind, None) for kind in QUICK),
        *(
            pytest.param(kind, family, marks=pytest.mark.slow)
            for kind, family in (
                ("another vocabulary", None),
                ("elsewhere", None),
                ("recurrent", None),
                ("sliding window", None),
                ("dflash", "qwen3_next"),
                ("gemma4", "gemma4_text"),
            )
        ),
    ],
)
async def test_streams_at_once_have_the_texts_of_one_at_a_time(kind, family, tmp_path, autojump_clock):
    async with at_work(kind, tmp_path, family=family, max_batch=8) as (rt, target):
        await check_seeded(rt, lookahead=2)
        # Some that are not drafted share the passes.
        requests = [(PROMPTS[index % 3], {"lookahead": 2 * (index % 2)}) for index in range(4)]
        found = await rt.generate_many(requests, max_tokens=NUM_TOKENS, ignore_eos=True)
        for (prompt, _), completion in zip(requests, found, strict=True):
            assert ids(completion.tokens) == greedy(target, prompt, NUM_TOKENS)
        assert (rt.statistics().rows_per_pass or 0) > 1


@every_implementation
async def test_a_cancelled_text_leaves_its_beginning(kind: str, tmp_path: Path, autojump_clock: Any) -> None:
    asked: dict[str, Any] = {"lookahead": 3, "ignore_eos": True, "reuse_prefix": True}
    async with at_work(kind, tmp_path) as (rt, target):
        for num_read in (1, 20):
            prompt = prompt_of(40, seed=num_read, vocab_size=48)
            async with rt.stream(prompt, max_tokens=200, **asked) as stream:
                async for token in stream:
                    if token.index == num_read:
                        break
            for longer in (prompt, [*prompt, 3, 4, 5], [*prompt, 3, 4, 9]):
                again = await rt.generate(longer, max_tokens=12, **asked)
                assert ids(again.tokens) == greedy(target, longer, 12)
                assert again.statistics.draft_failures == 0
                assert again.statistics.cached_tokens > 0
                assert again.statistics.proposed > 0 or kind == "lookup"
        assert rt.num_streams == 0


@every_implementation
async def test_a_text_may_go_on_from_an_earlier_one(kind: str, tmp_path: Path, autojump_clock: Any) -> None:
    async with at_work(kind, tmp_path) as (rt, target):
        await check_reuse(rt, target)


@every_implementation
async def test_texts_under_the_rejection_rule_repeat_by_their_seed(kind, tmp_path, autojump_clock, monkeypatch):
    # Which tokens are proposed depends on when the target stops waiting.
    monkeypatch.setattr(DrafterLink, "timeout_s", lambda *_: float("inf"))
    asked = {
        "max_tokens": NUM_TOKENS,
        "temperature": 0.8,
        "acceptance": "rejection",
        "lookahead": 3,
        "ignore_eos": True,
    }
    async with at_work(kind, tmp_path) as (rt, _):
        texts = [ids((await rt.generate(PROMPTS[0], seed=seed, **asked)).tokens) for seed in (11, 11, 12)]
        assert rt.statistics().draft_failures == 0
    assert texts[0] == texts[1] != texts[2]


class Fault(Exception):
    pass


@sweep("at", [1, 5])
@sweep(
    "kind",
    [
        "draft model",
        "eagle3",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("another vocabulary", "elsewhere")),
    ],
)
async def test_a_drafter_that_fails_leaves_the_text_to_the_target(kind, at, tmp_path, autojump_clock, monkeypatch):
    made, num_fed = [], 0

    def failing(feed: Any) -> Any:
        def fed(*arguments: Any) -> Any:
            nonlocal num_fed
            num_fed += 1
            if num_fed == at:
                raise Fault
            return feed(*arguments)

        return fed

    async with at_work(kind, tmp_path, on_drafter=made.append) as (rt, target):
        (drafter,) = made
        opened = drafter.open_sequence

        def open_sequence(**arguments: Any) -> Any:
            sequence = opened(**arguments)
            for name in ("feed", "feed_lazy"):
                setattr(sequence, name, failing(getattr(sequence, name)))
            return sequence

        monkeypatch.setattr(drafter, "open_sequence", open_sequence)
        completion = await rt.generate(PROMPTS[1], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
        assert ids(completion.tokens) == greedy(target, PROMPTS[1], NUM_TOKENS)
        assert completion.statistics.draft_failures == 1
        monkeypatch.undo()
        await check_greedy(rt, target, [3])
