"""A runtime with an EAGLE-3 drafter, whose weights are random: the texts are the target's, whatever is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from architectures import VOCAB_SIZE, build
from drafted_runtime import PROMPTS, check_greedy, drafted
from models import greedy
from sweeps import sweep
from trained_drafters import write_eagle3

import runtime


@sweep("name, lookahead", [("llama", 3), ("gemma3_text", "auto"), ("lfm2", 1)])
async def test_greedy_texts_are_the_targets(name: str, lookahead: Any, tmp_path: Path) -> None:
    built = build(name)
    async with drafted(write_eagle3(tmp_path, built), built) as rt:
        await check_greedy(rt, built, lookahead)


async def test_greedy_texts_are_the_targets_where_its_output_is_read(tmp_path: Path) -> None:
    built = build("llama")
    folder = write_eagle3(tmp_path, built, eagle_config={"use_aux_hidden_state": False})
    async with drafted(folder, built) as rt:
        await check_greedy(rt, built, 3)
        assert rt._draft.model.feature_layers == (len(built.layers),)


async def test_streams_at_once_share_the_targets_passes(tmp_path: Path) -> None:
    built = build("llama")
    async with drafted(write_eagle3(tmp_path, built, own_embedding=False), built, max_batch=8) as rt:
        completions = await rt.generate_many(PROMPTS, max_tokens=40, lookahead=2, ignore_eos=True)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert [token.id for token in completion.tokens] == greedy(built, prompt, 40)
        assert (rt.statistics().rows_per_pass or 0) > 1


async def test_open_takes_a_folder(tmp_path: Path) -> None:
    built = build("llama")
    async with runtime.open((built, None), write_eagle3(tmp_path, built)) as rt:
        stream = rt.stream(PROMPTS[0], max_tokens=30, lookahead=2, ignore_eos=True)
        assert [token.id async for token in stream] == greedy(built, PROMPTS[0], 30)
        assert stream.statistics().proposed > 0
        assert rt.estimates.draft_seconds > 0
        await rt.detach_draft()
        # Nothing is recorded where nobody reads it.
        assert [token.id async for token in rt.stream(PROMPTS[1], max_tokens=30, ignore_eos=True)] == greedy(
            built, PROMPTS[1], 30
        )
        await rt.attach_draft(tmp_path)
        completion = await rt.generate(PROMPTS[2], max_tokens=30, lookahead=2, ignore_eos=True)
        assert [token.id for token in completion.tokens] == greedy(built, PROMPTS[2], 30)
        assert completion.statistics.proposed > 0


async def test_a_runtime_that_closes_leaves_another_with_the_same_model_its_features(tmp_path: Path) -> None:
    built, folder = build("llama"), write_eagle3(tmp_path, build("llama"))
    own_class, first_closes = type(built.layers[0]), trio.Event()

    async def open_first(*, task_status: trio.TaskStatus[None]) -> None:
        async with runtime.open((built, None), folder):
            task_status.started()
            await first_closes.wait()

    async with trio.open_nursery() as nursery:
        await nursery.start(open_first)
        async with runtime.open((built, None), folder) as rt:
            stream = rt.stream(PROMPTS[0], max_tokens=30, lookahead=2, ignore_eos=True)
            found = [(await anext(stream)).id]
            first_closes.set()
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()
            found += [token.id async for token in stream]
            assert found == greedy(built, PROMPTS[0], 30)
            await check_greedy(rt, built, 2)
    assert type(built.layers[0]) is own_class


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, "it was made for another one"),
        ({"target_hidden_size": 48}, "and those of this target have 32"),
    ],
)
async def test_another_target_is_refused_with_what_differs(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    built = build("llama")
    write_eagle3(tmp_path, built, **changes)
    with pytest.raises(runtime.ModelError, match=said):
        async with runtime.open((built, None), tmp_path):
            raise AssertionError("should not be reached")


@pytest.mark.parametrize("acceptance", ["match", "block"])
async def test_seeded_texts_repeat_and_by_match_are_the_targets(acceptance: Any, tmp_path: Path) -> None:
    built = build("llama")
    sampled: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 11, "ignore_eos": True}
    async with drafted(write_eagle3(tmp_path, built), built) as rt:
        for prompt in PROMPTS:
            plain, *drafts = [
                (await rt.generate(prompt, lookahead=lookahead, acceptance=acceptance, **sampled)).tokens
                for lookahead in (0, 3, 3)
            ]
            first, second = ([token.id for token in tokens] for tokens in drafts)
            assert first == second
            if acceptance == "match":
                assert first == [token.id for token in plain]


async def test_a_cancelled_text_leaves_nothing_and_its_beginning_is_used_again(tmp_path: Path) -> None:
    built = build("llama")
    prompt = [int(token) for token in mx.random.randint(1, VOCAB_SIZE, (40,), key=mx.random.key(3)).tolist()]  # type: ignore[union-attr]
    async with drafted(write_eagle3(tmp_path, built), built) as rt:
        async with rt.stream(prompt, max_tokens=200, lookahead=3, ignore_eos=True, reuse_prefix=True) as stream:
            async for token in stream:
                if token.index == 20:
                    break
        again = await rt.generate(prompt, max_tokens=40, lookahead=3, ignore_eos=True, reuse_prefix=True)
        assert [token.id for token in again.tokens] == greedy(built, prompt, 40)
        assert again.statistics.cached_tokens > 0
        assert again.statistics.proposed > 0


async def test_a_drafter_with_half_of_the_vocabulary_costs_no_token(tmp_path: Path) -> None:
    built = build("llama")
    size = VOCAB_SIZE // 2
    folder = write_eagle3(tmp_path, built, draft_vocab_size=size)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    # Every second id of the target.
    weights["d2t"] = mx.arange(size, dtype=mx.int64)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    async with drafted(folder, built) as rt:
        for prompt in PROMPTS:
            stream = rt.stream(prompt, max_tokens=40, lookahead=3, ignore_eos=True)
            assert [token.id async for token in stream] == greedy(built, prompt, 40)
            assert stream.statistics().proposed > 0
