"""Every kind of trained drafter in every situation: the text is the target's, and nothing is left behind."""

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import trio
from architectures import VOCAB_SIZE, build
from distributions import SIGNIFICANCE, pooled_p_value, random_price
from drafted_runtime import NUM_TOKENS, PROMPTS, check_greedy, drafted, features_of, fresh_proposals
from models import greedy, prompt_of
from scripted import ids, run
from sweeps import sweep
from trained_drafters import BLOCK_SIZE, make, write_eagle3, write_medusa

import runtime
from actors.target.drafter_link import DrafterLink
from actors.trained.drafter_model import TrainedDrafter
from actors.trained.features import FeatureRecorder

# Tokens of the embeddings that some of the cases of MTP have.
SIZE = 48


@sweep("kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("mtp_deep", "gemma4"))])
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


async def test_nothing_is_recorded_of_texts_that_are_not_drafted(tmp_path, monkeypatch):
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


# Drafters that differ from another one only in their layers draw as that one does.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "medusa", "mtp_deep", "dspark", "dflash2"])
def test_under_rejection_texts_that_share_passes_have_the_targets_distribution(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(DrafterLink, "timeout_s", lambda *_: float("inf"))
    # Fewer tokens, and rows of one pass would be refused.
    num_sessions, num_tokens, temperature, vocab_size = 400, 3, 4.0, 16
    target = make(kind, tmp_path, vocab_size=vocab_size)
    prompt = (1, 2, 3)

    async def sample() -> list[runtime.Token]:
        asked: dict[str, Any] = {"max_tokens": num_tokens, "temperature": temperature, "ignore_eos": True}
        requests = [(prompt, {"seed": seed}) for seed in range(num_sessions)]
        async with drafted(tmp_path, target, price=random_price(1), max_batch=16) as rt:
            found = await rt.generate_many(requests, max_concurrent=16, lookahead=2, acceptance="rejection", **asked)
            assert (rt.statistics().rows_per_pass or 0) > 1
        return [each.tokens for each in found]

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
    # The first token is the target's own, of the pass that has read the prompt.
    share = sum(token.from_draft for text in tokens for token in text) / (num_sessions * (num_tokens - 1))
    assert share > 0.15


# --- families of targets --------------------------------------------------------------------------

# Most tokens that are drafted from the same features.
MOST = {"medusa": 3, "dflash": BLOCK_SIZE - 1}


@sweep(
    ("kind", "family", "lookaheads"),
    [
        ("eagle3", "gemma3_text", [3]),
        ("eagle3", "lfm2", [1]),
        # It reads the target's embedding, or output.
        ("eagle3", {"own_embedding": False}, [3]),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, [3]),
        ("gemma4", "gemma4_text", [8]),
        ("gemma4", "gemma4", ["auto"]),
        ("mtp", "deepseek_v3_deep", [4]),
        ("mtp", "glm4_moe_deep", [3]),
        ("mtp", "nemotron_h", [2]),
        ("mtp", "qwen3_5_moe", [1]),
        ("mtp", "qwen3_next", ["auto"]),
        ("mtp", "step3p5_deep", [5]),
        *(
            pytest.param(kind, family, [8, "auto", 1], marks=pytest.mark.slow)
            for kind in ("medusa", "dflash")
            for family in ("llama", "lfm2")
        ),
        *(pytest.param("mtp", family, [2], marks=pytest.mark.slow) for family in ("deepseek_v3", "mimo", "step3p5")),
    ],
)
async def test_greedy_texts_are_those_of_targets_of_every_family(kind, family, lookaheads, tmp_path):
    changes = {"family": family} if isinstance(family, str) else family
    target = make(kind, tmp_path, vocab_size=SIZE, **changes)
    async with drafted(tmp_path, target) as rt:
        found = await check_greedy(rt, target, lookaheads)
        if lookaheads[0] == 8 and kind in MOST:
            assert found[0].proposed <= MOST[kind] * found[0].rounds


@sweep(
    ("kind", "family"),
    [
        ("eagle3", "llama"),
        ("dflash", "llama"),
        ("mtp", "step3p5_deep"),
        pytest.param("medusa", "llama", marks=pytest.mark.slow),
        pytest.param("gemma4", "gemma4_text", marks=pytest.mark.slow),
    ],
)
async def test_what_is_drafted_after_a_miss_follows_from_the_targets_features(kind, family, tmp_path):
    target = make(kind, tmp_path, family=family, vocab_size=SIZE)
    text, proposals = await fresh_proposals(tmp_path, target, lookahead=3)
    drafter = TrainedDrafter(tmp_path, target, target_vocab_size=SIZE)
    features = features_of(target, text, drafter.feature_layers)
    for position, tokens in proposals:
        sequence = drafter.open_sequence(alongside_model=False)
        sequence.give(0, features[: position - 1])
        logits = sequence.feed((*text[:position], *tokens[:-1]), len(tokens))
        assert tokens == tuple(mx.argmax(logits, axis=-1).tolist())


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
            stream = rt.stream(PROMPTS[0], max_tokens=NUM_TOKENS, lookahead=2, ignore_eos=True)
            found = [(await anext(stream)).id]
            first_closes.set()
            while nursery.child_tasks:
                await trio.lowlevel.checkpoint()
            found += [token.id async for token in stream]
            assert found == greedy(built, PROMPTS[0], NUM_TOKENS)
            await check_greedy(rt, built, [2])
    assert type(built.layers[0]) is own_class
