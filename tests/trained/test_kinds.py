"""Every kind of trained drafter in every situation: the text is the target's, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from architectures import VOCAB_SIZE
from distributions import DRAWING_RULES, SIGNIFICANCE, pooled_p_value, random_price
from drafted_runtime import NUM_TOKENS, PROMPTS, check_seeded, drafted
from models import greedy, prompt_of
from scripted import ids, run
from trained_drafters import KINDS, make, write_eagle3, write_medusa

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.target.drafter_link import DrafterLink
from actors.trained.features import FeatureRecorder

every_kind = pytest.mark.parametrize("kind", KINDS)
# The other kinds draft by the same code.
mostly_slow = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "eagle3" else pytest.mark.slow) for kind in KINDS]
)


async def check_text(rt: runtime.Runtime, target: Any) -> None:
    """Compare a drafted text with that of the target alone."""
    completion = await rt.generate(PROMPTS[1], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
    assert ids(completion.tokens) == greedy(target, PROMPTS[1], NUM_TOKENS)
    assert completion.statistics.draft_failures == 0
    assert completion.statistics.proposed > 0


@every_kind
@pytest.mark.parametrize("rewind", ["checkpoint", pytest.param("none", marks=pytest.mark.slow)])
async def test_greedy_texts_are_the_targets_however_it_rewinds(kind: str, rewind: Any, tmp_path: Path) -> None:
    target = make(kind, tmp_path)
    async with drafted(tmp_path, target, cache_options=CacheOptions(rewind)) as rt:
        await check_text(rt, target)


@mostly_slow
@pytest.mark.parametrize("is_hybrid", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_streams_at_once_have_the_texts_of_one_at_a_time(kind: str, is_hybrid: bool, tmp_path: Path) -> None:
    target = make(kind, tmp_path, is_hybrid=is_hybrid)
    async with drafted(tmp_path, target, max_batch=8) as rt:
        await check_seeded(rt, lookahead=2)
        # Some that are not drafted share the passes.
        async with trio.open_nursery() as nursery:
            found: dict[int, list[int]] = {}

            async def generate(index: int, lookahead: int) -> None:
                asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "lookahead": lookahead, "ignore_eos": True}
                found[index] = ids((await rt.generate(PROMPTS[index % 3], **asked)).tokens)

            for index in range(6):
                nursery.start_soon(generate, index, 2 * (index % 2))
        for index, text in found.items():
            assert text == greedy(target, PROMPTS[index % 3], NUM_TOKENS)
        assert (rt.statistics().rows_per_pass or 0) > 1


@mostly_slow
@pytest.mark.parametrize("num_read", [pytest.param(1, marks=pytest.mark.slow), 20])
async def test_a_cancelled_text_leaves_its_beginning(kind: str, num_read: int, tmp_path: Path) -> None:
    target, prompt = make(kind, tmp_path), prompt_of(40, vocab_size=48)
    asked: dict[str, Any] = {"lookahead": 3, "ignore_eos": True, "reuse_prefix": True}
    async with drafted(tmp_path, target) as rt:
        async with rt.stream(prompt, max_tokens=200, **asked) as stream:
            async for token in stream:
                if token.index == num_read:
                    break
        for longer in (prompt, [*prompt, 3, 4, 5], [*prompt, 3, 4, 9]):
            again = await rt.generate(longer, max_tokens=NUM_TOKENS, **asked)
            assert ids(again.tokens) == greedy(target, longer, NUM_TOKENS)
            assert again.statistics.draft_failures == 0
            assert again.statistics.cached_tokens > 0
            assert again.statistics.proposed > 0
        assert rt.num_streams == 0


class Fault(Exception):
    pass


@mostly_slow
@pytest.mark.parametrize("at", [pytest.param(1, marks=pytest.mark.slow), 5])
async def test_a_drafter_that_fails_leaves_the_text_to_the_target(
    kind: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(kind, tmp_path)
    async with drafted(tmp_path, target) as rt:
        sequences = type(rt._draft.model.open_sequence(beside_another=False))
        feed, num_fed = sequences.feed, 0

        def failing(*arguments: Any) -> Any:
            nonlocal num_fed
            num_fed += 1
            if num_fed == at:
                raise Fault
            return feed(*arguments)

        monkeypatch.setattr(sequences, "feed", failing)
        monkeypatch.setattr(sequences, "feed_lazy", failing)
        completion = await rt.generate(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=3, ignore_eos=True)
        assert ids(completion.tokens) == greedy(target, PROMPTS[0], NUM_TOKENS)
        assert completion.statistics.draft_failures == 1
        monkeypatch.undo()
        await check_text(rt, target)


@mostly_slow
async def test_another_drafter_may_take_over_with_texts_that_were_read_without_it(kind: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path / kind)
    other = (write_eagle3 if kind == "medusa" else write_medusa)(tmp_path / "other", target)
    asked: dict[str, Any] = {"max_tokens": 12, "lookahead": 2, "ignore_eos": True, "reuse_prefix": True}
    prompt = prompt_of(20, vocab_size=VOCAB_SIZE)

    async def check(rt: runtime.Runtime, *, is_drafted: bool) -> None:
        completion = await rt.generate(prompt, **asked)
        assert ids(completion.tokens) == greedy(target, prompt, 12)
        assert completion.statistics.draft_failures == 0
        assert (completion.statistics.proposed > 0) == is_drafted

    async with runtime.open((target, None)) as rt:
        await check(rt, is_drafted=False)
        for folder in (tmp_path / kind, other, tmp_path / kind):
            await rt.attach_draft(folder)
            await check(rt, is_drafted=True)
            await check(rt, is_drafted=True)
            await rt.detach_draft()
            await check(rt, is_drafted=False)


async def test_nothing_is_recorded_of_texts_that_are_not_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, taken = make("eagle3", tmp_path), []
    usual = FeatureRecorder.take

    def take(recorder: FeatureRecorder, shape: tuple[int, int]) -> mx.array:
        taken.append(shape)
        return usual(recorder, shape)

    monkeypatch.setattr(FeatureRecorder, "take", take)
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "reuse_prefix": True}
    async with drafted(tmp_path, target, max_batch=8) as rt:
        await rt.generate(PROMPTS[0], lookahead=0, **asked)
        await rt.generate_many(PROMPTS, lookahead=0, **asked)
        assert taken == []
        await rt.generate(PROMPTS[0], lookahead=2, **asked)
        assert taken
        taken.clear()
        await rt.generate_many(PROMPTS, lookahead=0, **asked)
        assert taken == []


@pytest.mark.slow
@every_kind
def test_under_rejection_texts_that_share_passes_have_the_targets_distribution(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrafterLink, "timeout_s", lambda *_: float("inf"))
    # Fewer tokens, and rows of one pass would be refused.
    num_sessions, num_tokens, temperature, vocab_size = 400, 3, 4.0, 16
    target = make(kind, tmp_path, vocab_size=vocab_size)
    prompt = (1, 2, 3)

    async def sample() -> list[runtime.Token]:
        asked: dict[str, Any] = {"max_tokens": num_tokens, "temperature": temperature, "ignore_eos": True}
        found: dict[int, list[runtime.Token]] = {}
        async with drafted(tmp_path, target, price=random_price(1), max_batch=8) as rt:

            async def generate(seed: int) -> None:
                completion = await rt.generate(
                    prompt, lookahead=2, acceptance=DRAWING_RULES[seed % 2], seed=seed, **asked
                )
                found[seed] = completion.tokens

            for first in range(0, num_sessions, 8):
                async with trio.open_nursery() as nursery:
                    for seed in range(first, first + 8):
                        nursery.start_soon(generate, seed)
            assert (rt.statistics().rows_per_pass or 0) > 1
        return list(found.values())

    tokens = run(sample)
    after: dict[tuple[int, ...], Counter[int]] = {}
    for text in map(ids, tokens):
        for end in range(num_tokens):
            after.setdefault((*prompt, *text[:end]), Counter())[text[end]] += 1
    samples = []
    for text, counts in after.items():
        if counts.total() >= 20:
            probs = mx.softmax(target(mx.array([text]))[0, -1] / temperature).tolist()
            samples.append((counts, dict(enumerate(probs))))
    assert len(samples) > 5
    assert pooled_p_value(samples) > SIGNIFICANCE
    share = sum(token.from_draft for text in tokens for token in text) / (num_sessions * num_tokens)
    assert share > 0.15
