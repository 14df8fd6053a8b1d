"""Draft models with a head for part of their vocabulary."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import VOCAB_SIZE, build
from models import greedy, llama, near, prompt_of, save
from sweeps import sweep

import runtime
from actors.translated.reduced_head import reduce_head

NUM_KEPT = 24


def quantized(model: nn.Module) -> nn.Module:
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, layer: hasattr(layer, "to_quantized"))
    return model


def wide(**changes: Any) -> nn.Module:
    return llama(0, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, **changes)


# Heads of their own, under several names; embeddings; logits that are capped after the head.
HEADS = {
    "lm_head": lambda: build("qwen3"),
    "output": lambda: build("internlm2"),
    "embed_out": lambda: build("gpt_neox"),
    "tied": lambda: wide(tie_word_embeddings=True),
    "tied, quantised": lambda: quantized(wide(tie_word_embeddings=True)),
    "quantised": lambda: quantized(wide(tie_word_embeddings=False)),
    "capped": lambda: build("gemma2"),
}


@sweep("head", HEADS)
def test_logits_are_those_of_the_whole_head_or_the_lowest(head: str) -> None:
    model, tokens = HEADS[head](), mx.array([[3, 5, VOCAB_SIZE - 1]])
    whole = model(tokens)
    reduce_head(model, None, NUM_KEPT, "draft")
    reduced = model(tokens)
    assert reduced.shape == whole.shape
    assert mx.allclose(reduced[..., :NUM_KEPT], whole[..., :NUM_KEPT], atol=1e-4)
    assert mx.all(reduced[..., NUM_KEPT:] <= mx.min(whole[..., :NUM_KEPT], axis=-1, keepdims=True))


class Reordered(nn.Module):
    """A model that reorders what its head computes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = wide()

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model(inputs)[..., ::-1]


def test_a_model_whose_logits_are_not_those_of_its_head_is_left_as_it_is() -> None:
    model, tokens = Reordered(), mx.array([[3, 5]])
    mx.eval(model.parameters())
    before = model(tokens)
    with pytest.raises(runtime.ModelError, match="cannot be reduced"):
        reduce_head(model, None, NUM_KEPT, "draft")
    assert mx.array_equal(model(tokens), before)


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}])
async def test_texts_are_exact_and_drafts_are_of_the_reduced_vocabulary(tmp_path, settings):
    target = llama(1)
    draft = runtime.ModelSpec(save(tmp_path / "draft", near(target, noise=0.02)), draft_vocabulary=VOCAB_SIZE // 2)
    async with runtime.open((target, None), draft=draft) as rt:
        completion = await rt.generate(prompt_of(8), max_tokens=60, lookahead=3, **settings)
    drafted = [token.id for token in completion.tokens if token.drafted_by is not None]
    assert 0 < len(drafted) < 60
    assert max(drafted) < VOCAB_SIZE // 2 <= max(token.id for token in completion.tokens)
    if not settings:
        assert [token.id for token in completion.tokens] == greedy(target, prompt_of(8), 60)


def test_a_target_needs_its_whole_vocabulary(tmp_path: Path) -> None:
    target = runtime.ModelSpec(save(tmp_path / "target", llama(1)), draft_vocabulary=8)
    with pytest.raises(runtime.SettingsError, match="of a draft model"):
        runtime.open_sync(target)
