"""Features are what enters the layers of a target, in every family, and recording them changes nothing."""

from __future__ import annotations

import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, VOCAB_SIZE, build
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache

from actors.mlx.layer_evaluation import LayerEvaluation, evaluating, evaluating_layers
from actors.trained.features import FeatureRecorder
from protocol.errors import ModelError

TOKENS = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]) % VOCAB_SIZE

# What enters their layers is more than one vector a token, or their layers are not called as such.
UNRECORDABLE = {"gemma3n", "deepseek_v41", "iquestloopcoder"}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_family_can_be_recorded_or_says_that_it_cannot(name: str) -> None:
    model = build(name)
    tokens = TOKENS[:1]
    expected = model(tokens, cache=make_prompt_cache(model))
    num_layers = len(model.layers)
    recorder = FeatureRecorder(model, (0, num_layers // 2, num_layers))
    with evaluating_layers(model):
        with recorder.recording():
            logits = model(tokens, cache=make_prompt_cache(model))
        assert mx.array_equal(logits, expected)
        if name in UNRECORDABLE:
            with pytest.raises(ModelError, match="cannot have a drafter that reads its hidden states"):
                recorder.take((1, 5))
            return
        features = recorder.take((1, 5))
    assert features.shape[:2] == (1, 5)
    assert features.shape[2] % 3 == 0
    assert bool(mx.all(mx.isfinite(features)))
    # Each layer does something.
    parts = mx.split(features, 3, axis=-1)
    assert not mx.allclose(parts[0], parts[-1])


@pytest.mark.parametrize("evaluation", LayerEvaluation)
def test_they_are_what_enters_the_layers(evaluation: LayerEvaluation) -> None:
    model = build("llama")
    num_layers = len(model.layers)
    recorder = FeatureRecorder(model, (*range(num_layers), num_layers))
    with evaluating_layers(model), evaluating(evaluation), recorder.recording():
        model(TOKENS, cache=make_prompt_cache(model))
    found = mx.split(recorder.take((2, 5)), num_layers + 1, axis=-1)
    hidden = model.model.embed_tokens(TOKENS)
    mask = create_attention_mask(hidden, None)
    for layer, part in zip(model.layers, found, strict=False):
        assert mx.allclose(part, hidden, atol=1e-5)
        hidden = layer(hidden, mask, None)
    assert mx.allclose(found[-1], hidden, atol=1e-5)


def test_nothing_is_recorded_where_nobody_asks() -> None:
    model = build("llama")
    recorder = FeatureRecorder(model, (1,))
    with evaluating_layers(model):
        with recorder.recording():
            model(TOKENS, cache=make_prompt_cache(model))
        assert recorder.take((2, 5)).shape[:2] == (2, 5)
        model(TOKENS, cache=make_prompt_cache(model))
        with pytest.raises(ModelError):
            recorder.take((2, 5))
