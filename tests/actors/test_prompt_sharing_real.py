"""Prompts that several sessions share, on real models: the texts are those of separate requests."""

import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import ARCHITECTURES, build
from cache_subjects import ATOL
from completions import ids
from drafted_runtime import drafted
from models import llama, mamba, near, prompt_of, sliding_llama
from prefills import Prefills
from scripted import priced
from sweeps import sweep
from trained_drafters import write_eagle3

import runtime
from actors.actor import CHECKPOINT_DISTANCE
from actors.drafters.draft_session import DraftSession
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.mlx.sequence import MLXSequence
from protocol.messages import Features

# Plain key-value caches, sliding windows that the prompt fills, and recurrent states.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "sliding_llama": functools.partial(sliding_llama, window=32),
    "mamba": mamba,
}
PROMPT = prompt_of(70, vocab_size=64)
NUM_READ = len(PROMPT) - 1


@functools.cache
def family(name: str) -> nn.Module:
    return FAMILIES[name]() if name in FAMILIES else build(name)


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "qwen3_next"))]
)
async def test_four_answers_to_a_prompt_read_it_once_and_are_those_of_four_requests(name: str) -> None:
    prefills, model = Prefills(), family(name)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "lookahead": 3, "prefill_step_size": 16}
    async with runtime.open((model, None), (near(model, noise=0.05), None), trace=prefills) as rt:
        alone = [ids(await rt.generate(PROMPT, seed=seed, **asked)) for seed in range(4)]
        assert len(set(map(tuple, alone))) > 1
        assert prefills.num_read("target") == 4 * NUM_READ
        prefills.num_read("draft")
        together = await rt.generate_many([(PROMPT, {"seed": seed}) for seed in range(4)], reuse_prefix=True, **asked)
        assert [ids(completion) for completion in together] == alone
        assert prefills.num_read("target") == NUM_READ
        # The draft model may also have to read what the target has committed meanwhile.
        assert NUM_READ <= prefills.num_read("draft") < 2 * NUM_READ
        statistics = [completion.statistics for completion in together]
        assert sorted(each.cached_tokens for each in statistics) == [0, NUM_READ, NUM_READ, NUM_READ]
        assert sum(each.prefilled_tokens for each in statistics) == NUM_READ
        # Each of them can be gone on from, at the end of the prompt, too.
        for seed in range(2):
            prompt = [*PROMPT, 60 - seed, 3]
            warm = await rt.generate(prompt, seed=seed, reuse_prefix=True, **asked)
            assert ids(warm) == ids(await rt.generate(prompt, seed=seed, **asked))
            assert warm.statistics.cached_tokens >= NUM_READ


@pytest.mark.parametrize("options", [{"kv_bits": 4, "kv_group_size": 32}, {"max_kv_size": 48}])
async def test_caches_that_depend_on_passes_give_the_texts_of_separate_requests(options: dict[str, Any]) -> None:
    model = build("qwen3", head_dim=32)
    asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "lookahead": 0, "prefill_step_size": 16}
    async with runtime.open((model, None), quantized_kv_start=30, **options) as rt:
        alone = [ids(await rt.generate(PROMPT, seed=seed, **asked)) for seed in range(3)]
        together = await rt.generate_many([(PROMPT, {"seed": seed}) for seed in range(3)], reuse_prefix=True, **asked)
        assert [ids(completion) for completion in together] == alone
        assert sum(completion.statistics.prefilled_tokens for completion in together) == NUM_READ


@pytest.mark.parametrize(("start", "read"), [(0, 110), (10_000, 110), (70, 110), (90, 3 * 90)])
async def test_quantised_caches_share_a_beginning_that_each_would_have_quantised_alike(start: int, read: int) -> None:
    model = build("qwen3", head_dim=32)
    prompts = [[*prompt_of(80, vocab_size=64), *prompt_of(11, seed=seed, vocab_size=64)] for seed in (1, 2, 3)]
    asked: dict[str, Any] = {"max_tokens": 12, "lookahead": 0, "prefill_step_size": 16}
    async with runtime.open((model, None), kv_bits=4, kv_group_size=32, quantized_kv_start=start) as rt:
        alone = [ids(await rt.generate(prompt, **asked)) for prompt in prompts]
        together = await rt.generate_many(prompts, reuse_prefix=True, **asked)
        assert [ids(completion) for completion in together] == alone
        assert sum(completion.statistics.prefilled_tokens for completion in together) == read


async def test_a_trained_drafter_copies_what_it_made_of_the_features_of_the_prompt(
    tmp_path: Path, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, given = build("llama"), dict[int, list[range]]()
    asked: dict[str, Any] = {"max_tokens": 20, "lookahead": 3, "ignore_eos": True, "temperature": 0.8}
    take_features = DraftSession.take_features

    def noted(self: DraftSession, features: Features | None) -> None:
        if features is not None:
            given.setdefault(self.id, []).append(range(features.start, features.start + len(features.values)))
        take_features(self, features)

    monkeypatch.setattr(DraftSession, "take_features", noted)
    async with drafted(write_eagle3(tmp_path, built), built, price=priced(load=0.0)) as rt:
        alone = [await rt.generate(PROMPT, seed=seed, **asked) for seed in range(3)]
        together = await rt.generate_many([(PROMPT, {"seed": seed}) for seed in range(3)], reuse_prefix=True, **asked)
        assert list(map(ids, together)) == list(map(ids, alone))
        assert sum(completion.statistics.prefilled_tokens for completion in together) == NUM_READ
        assert all(completion.statistics.proposed > 0 for completion in together)
    assert sorted(given) == list(range(6))
    for session, parts in given.items():
        # Only the last two readers of three at once have nothing to read.
        assert parts[0].start == (NUM_READ if session > 3 else 0)
        assert all(part.stop == following.start for part, following in pairwise(parts))


# --- copies of a sequence ---------------------------------------------------------------------------


def read(model: MLXModel) -> MLXSequence:
    """A sequence that has read the prompt, as prefill reads it."""
    sequence = model.open_sequence(alongside_model=False)
    for begin, end in ((0, NUM_READ - CHECKPOINT_DISTANCE), (NUM_READ - CHECKPOINT_DISTANCE, NUM_READ)):
        sequence.feed(tuple(PROMPT[begin:end]), 0)
        if sequence.needs_prefix_checkpoints:
            sequence.add_prefix_checkpoint()
    return sequence


def read_on(sequence: MLXSequence, tokens: list[int]) -> mx.array:
    rows = [sequence.feed((token,), 1) for token in tokens]
    logits = mx.concatenate([row for row in rows if row is not None])
    mx.eval(logits)
    return logits


# One architecture with each combination of caches, without those of a class of the model's own.
BY_CACHES = {tuple(sorted(set(each.kinds))): name for name, each in reversed(ARCHITECTURES.items())}
(OF_ITS_OWN,) = (BY_CACHES.pop(kinds) for kinds in list(BY_CACHES) if kinds == ("LayerCache",))


@sweep("name", BY_CACHES.values())
def test_a_sequence_and_its_copies_do_not_see_each_others_tokens(name: str) -> None:
    model = MLXModel(build(name), CacheOptions())
    ways = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5], [3, 3, 3, 3, 3]]
    expected, source = [read_on(read(model), way) for way in ways], read(model)
    first = source.copy(NUM_READ)
    assert (first.length, first.needs_prefix_checkpoints) == (NUM_READ, source.needs_prefix_checkpoints)
    # By turns, so that each writes after the others.
    for i in range(5):
        for sequence, way, logits in ((source, ways[0], expected[0]), (first, ways[1], expected[1])):
            assert mx.allclose(read_on(sequence, way[i : i + 1]), logits[i : i + 1], atol=ATOL), (name, i)
    copies = [first, source]
    if source.reusable_length(NUM_READ, NUM_READ) == NUM_READ:
        # One that is made when the others have gone on is as they were.
        second = source.copy(NUM_READ)
        assert mx.allclose(read_on(second, ways[2]), expected[2], atol=ATOL)
        copies.append(second)
    for sequence in copies:
        if length := sequence.reusable_length(NUM_READ, NUM_READ):
            assert length == NUM_READ
            sequence.reuse(length)
            assert mx.allclose(read_on(sequence, ways[1]), expected[1], atol=ATOL), name
        if length := sequence.reusable_length(NUM_READ - CHECKPOINT_DISTANCE, NUM_READ):
            assert length == NUM_READ - CHECKPOINT_DISTANCE
            sequence.reuse(length)
            sequence.feed(tuple(PROMPT[length:NUM_READ]), 0)
            assert mx.allclose(read_on(sequence, ways[0]), expected[0], atol=ATOL), name


async def test_caches_of_a_class_that_is_not_known_are_not_copied() -> None:
    async with runtime.open((build(OF_ITS_OWN), None)) as rt:
        asked: dict[str, Any] = {"max_tokens": 4, "reuse_prefix": True}
        alone = await rt.generate(PROMPT[:9], max_tokens=4)
        together = await rt.generate_many([PROMPT[:9]] * 2, **asked)
        assert [ids(completion) for completion in together] == [ids(alone)] * 2
        assert [completion.statistics.prefilled_tokens for completion in together] == [8, 8]


@pytest.mark.parametrize("name", ["llama", "sliding_llama"])
def test_copies_take_memory_only_once_they_are_fed(name: str) -> None:
    model = MLXModel(family(name), CacheOptions())
    source = model.open_sequence(alongside_model=False)
    source.feed(tuple(PROMPT * 20), 0)
    mx.clear_cache()
    before, num_bytes = mx.get_active_memory(), source.num_bytes
    copies = [source.copy(source.length) for _ in range(4)]
    assert mx.get_active_memory() - before < num_bytes // 4
    for sequence in copies:
        read_on(sequence, [1])
    # And then no more than one that has read the prompt by itself: a buffer grows by 256 tokens.
    assert mx.get_active_memory() - before < 4 * 1.5 * num_bytes
