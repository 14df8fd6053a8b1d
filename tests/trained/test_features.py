"""Features are what enters the layers of a target, in every family, and recording them changes nothing."""

import random

import mlx.core as mx
import pytest
from architectures import ARCHITECTURES, VOCAB_SIZE, build
from drafted_runtime import recorded
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from sweeps import sweep

from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating, evaluating_layers
from actors.mlx.model import MLXModel
from actors.model import Feed
from actors.trained.features import FeatureRecorder, recording
from actors.trained.kinds.target_parts import final_norm_of, head_of, width_of
from protocol.errors import ModelError

TOKENS = mx.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]) % VOCAB_SIZE

# What enters their layers is more than one vector a token, or their layers are not called as such.
UNRECORDABLE = {"gemma3n", "deepseek_v41", "iquestloopcoder"}
# Their norm or head is not a module of its own.
WITHOUT_PARTS = {"longcat_flash_ngram", "nanochat", "phixtral", "talkie"}


@sweep("name", ARCHITECTURES)
def test_every_familys_features_lead_to_its_logits_or_an_error(name: str) -> None:
    model, tokens = build(name), TOKENS[:1]
    expected = model(tokens, cache=make_prompt_cache(model))
    num_layers = len(model.layers)
    recorder = FeatureRecorder(model, (0, num_layers // 2, num_layers))
    with evaluating_layers(model):
        with recording(recorder):
            logits = model(tokens, cache=make_prompt_cache(model))
        assert mx.array_equal(logits, expected)
        if name in UNRECORDABLE:
            with pytest.raises(ModelError, match="cannot have a drafter that reads its hidden states"):
                recorder.take((1, 5))
            return
        features = recorder.take((1, 5))
    assert features.shape[:2] == (1, 5)
    assert bool(mx.all(mx.isfinite(features)))
    # Each layer does something.
    first, _, last = mx.split(features, 3, axis=-1)
    assert not mx.allclose(first, last)
    try:
        found = head_of(model, "the drafter")(final_norm_of(model, "the drafter")(last))
        assert last.shape[-1] == width_of(model, "the drafter")
    except ModelError:
        assert name in WITHOUT_PARTS
        return
    assert name not in WITHOUT_PARTS
    # Some families scale or bound the logits of their head.
    order, expected_order = (mx.argsort(each[0], axis=-1)[:, -3:] for each in (found, logits))
    assert mx.array_equal(order, expected_order)


@sweep("evaluation", LayerEvaluation)
def test_they_are_what_enters_the_layers_while_somebody_asks(evaluation: LayerEvaluation) -> None:
    model = build("llama")
    num_layers = len(model.layers)
    recorder = FeatureRecorder(model, (*range(num_layers), num_layers))
    with evaluating_layers(model), evaluating(evaluation):
        with recording(recorder):
            model(TOKENS, cache=make_prompt_cache(model))
        found = mx.split(recorder.take((2, 5)), num_layers + 1, axis=-1)
        model(TOKENS, cache=make_prompt_cache(model))
    with pytest.raises(ModelError):
        recorder.take((2, 5))
    hidden = model.model.embed_tokens(TOKENS)
    mask = create_attention_mask(hidden, None)
    for layer, part in zip(model.layers, found, strict=False):
        assert mx.allclose(part, hidden, atol=1e-5)
        hidden = layer(hidden, mask, None)
    assert mx.allclose(found[-1], hidden, atol=1e-5)


@sweep("name", ["llama", "gemma3_text", "lfm2", "qwen3_next"])
def test_each_text_of_a_shared_pass_has_its_own(name: str) -> None:
    built, draws = build(name), random.Random(5)
    with evaluating_layers(built):
        model = MLXModel(built, CacheOptions())
        model.record_features((0, 1, len(built.layers)))
        texts: list[list[int]] = [[draws.randrange(VOCAB_SIZE) for _ in range(length)] for length in (9, 4, 13)]
        sequences = [model.open_sequence(alongside_model=False) for _ in texts]
        found: list[list[mx.array]] = [[] for _ in texts]

        def take() -> None:
            for text, sequence, parts in zip(texts, sequences, found, strict=True):
                if (taken := sequence.features.take(sequence.length)) is not None:
                    begin, features = taken.start, taken.values
                    assert begin == sum(part.shape[0] for part in parts)
                    assert begin + features.shape[0] <= len(text)
                    parts.append(features)

        for text, sequence in zip(texts, sequences, strict=True):
            sequence.feed(tuple(text), 0)
        take()
        for _ in range(12):
            fed = [[draws.randrange(VOCAB_SIZE) for _ in range(draws.randint(1, 4))] for _ in texts]
            num_rejected = [draws.randrange(len(tokens)) for tokens in fed]
            for sequence, tokens, text in zip(sequences, fed, texts, strict=True):
                sequence.prepare(len(text) - sequence.length + len(tokens), len(text))
            feeds = [
                Feed(sequence, (*text[sequence.length :], *tokens), 1)
                for sequence, text, tokens in zip(sequences, texts, fed, strict=True)
            ]
            mx.eval(model.feed_together(feeds))
            for sequence, tokens, text, rejected in zip(sequences, fed, texts, num_rejected, strict=True):
                text += tokens[: len(tokens) - rejected]
                sequence.rewind(len(text))
            take()
        assert all(sequence.is_row for sequence in sequences)
        for text, sequence, parts in zip(texts, sequences, found, strict=True):
            together = mx.concatenate(parts)
            assert together.shape[0] == sequence.length
            assert mx.allclose(together, recorded(model, tuple(text[: sequence.length])), atol=1e-3, rtol=1e-3)
            sequence.close()


def test_a_pass_ahead_brings_the_features_of_its_tokens() -> None:
    built = build("llama")
    with evaluating_layers(built):
        model = MLXModel(built, CacheOptions())
        model.record_features((1,))
        sequences = [model.open_sequence(alongside_model=False) for _ in range(3)]
        for sequence in sequences:
            sequence.feed((3, 1, 4), 0)
            sequence.features.take(sequence.length)
        model.feed_together([Feed(sequence, (5,), 1) for sequence in sequences])
        model.feed_ahead(sequences, mx.array([6, 7, 8]))
        sequences.pop(0).close()
        for i, sequence in enumerate(sequences):
            taken = sequence.features.take(sequence.length)
            assert taken.start == 3
            assert mx.allclose(taken.values, recorded(model, (3, 1, 4, 5, 7 + i))[3:], atol=1e-4)
            sequence.close()
