"""Fingerprints of models: equal for the same model however it was loaded, different for other models."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from architectures import ARCHITECTURES, build
from mlx.utils import tree_flatten, tree_unflatten
from models import Wrapped, gemma3_text, llama, mamba, near, qwen3, save
from sweeps import sweep

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.persistence.fingerprint import fingerprint, vocabulary_digest


def changed(model: nn.Module, name: str, change: Callable[[mx.array], mx.array]) -> nn.Module:
    copy = type(model)(model.args)
    weights = [(key, change(weight) if key == name else weight) for key, weight in tree_flatten(model.parameters())]
    copy.update(tree_unflatten(weights))
    return copy


def quantized(bits: int) -> nn.Module:
    model = llama(hidden_size=64, num_attention_heads=4)
    nn.quantize(model, group_size=32, bits=bits)
    return model


def in_precision(dtype: mx.Dtype) -> nn.Module:
    model = llama()
    model.set_dtype(dtype)
    return model


def test_the_same_model_has_the_same_fingerprint_however_often_it_is_loaded(tmp_path: Path) -> None:
    where = save(tmp_path / "model", llama())
    assert fingerprint(llama()).difference(fingerprint(llama())) is None
    for make in (llama, lambda: quantized(4), lambda: scaled(1.0), lambda: mlx_lm.load(where)[0]):
        assert fingerprint(make()) == fingerprint(make())


def test_a_model_at_work_has_the_fingerprint_that_it_has_at_rest() -> None:
    model = llama()
    at_rest, wrapped = fingerprint(model), MLXModel(model, CacheOptions())
    with wrapped.evaluating_layers():
        sequence = wrapped.open_sequence(alongside_model=True)
        sequence.feed((1, 2, 3), 1)
        assert fingerprint(model) == at_rest


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another architecture": (lambda: qwen3(), "its architecture is qwen3, not llama"),
    "a recurrent one": (lambda: mamba(), "its architecture is mamba, not llama"),
    "more layers": (lambda: llama(num_hidden_layers=3), "parameters, not"),
    "another seed": (lambda: llama(seed=1), "its weights differ"),
    "trained further": (lambda: near(llama(), noise=1e-4), "its weights differ"),
    "another number format": (lambda: in_precision(mx.bfloat16), "number formats"),
    "another kind of norm": (lambda: llama(rms_norm_eps=1e-6), "its configuration differs"),
    "another frequency": (lambda: llama(rope_theta=20_000.0), "its configuration differs"),
    "more heads": (lambda: llama(num_key_value_heads=2), "parameters, not"),
    "in a wrapping": (lambda: Wrapped(llama()), "names, shapes"),
}
PAIRS = [
    *((llama, *case) for case in OTHERS.values()),
    (lambda: gemma3_text(window=16), lambda: gemma3_text(window=8), "its configuration differs"),
    (lambda: scaled(1.0), lambda: scaled(1.5), "its weights differ"),
]


@sweep("one, other, why", PAIRS)
def test_another_model_has_another_fingerprint_and_it_is_said_why(one, other, why):
    difference = fingerprint(one()).difference(fingerprint(other()))
    assert why in difference


@sweep("name", [name for name, _ in tree_flatten(llama().parameters())])
def test_a_change_in_any_one_tensor_is_noticed(name: str) -> None:
    model = llama()
    assert fingerprint(changed(model, name, lambda weight: weight * 1.001)) != fingerprint(model)


def scaled(factor: float) -> nn.Module:
    """With frequencies that are no parameters."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = llama(rope_scaling={**scaling, "original_max_position_embeddings": 64})
    for layer in model.layers:
        layer.self_attn.rope._freqs = layer.self_attn.rope._freqs * factor
    return model


@pytest.mark.slow
def test_every_architecture_has_a_fingerprint_of_its_own() -> None:
    found = {}
    for name in ARCHITECTURES:
        model = build(name)
        found[name] = fingerprint(model)
        # What a model stores while it works is not part of its fingerprint.
        sequence = MLXModel(model, CacheOptions()).open_sequence(alongside_model=False)
        sequence.feed((1, 2, 3), 1)
        assert fingerprint(model) == fingerprint(build(name)) == found[name], name
    assert len(set(found.values())) == len(found)


def test_a_fingerprint_reads_only_a_little_of_a_large_tensor() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.zeros((4096, 4096))

    model = Large()
    mx.eval(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    fingerprint(model)
    assert mx.get_peak_memory() - before < 1_000_000


def test_vocabularies_are_told_apart_by_any_token() -> None:
    words = {"a": 0, "b": 1, "ü\n": 2}
    assert vocabulary_digest(words) == vocabulary_digest(dict(reversed(words.items())))
    for other in ({"a": 0, "b": 1}, {"a": 1, "b": 0, "ü\n": 2}, {**words, "c": 3}, {"a": 0, "b": 1, "ü": 2}):
        assert vocabulary_digest(other) != vocabulary_digest(words)
    assert len(json.dumps(vocabulary_digest(words))) == 66
