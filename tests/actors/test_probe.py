"""The probe: objects that are no models are rejected on opening, and a loaded model can be checked at any time."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from completions import open_and_close
from mlx_lm.models import phi3small
from models import VOCAB_SIZE, Wrapped, llama
from scripted import ScriptedFailure, ScriptedModel, truthful
from sweeps import sweep

from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.probe import probe
from protocol.errors import ModelError

TARGET = llama()


class Otherwise(Wrapped):
    """A model that returns something other than logits."""

    def __init__(self, change: Callable[[mx.array], Any]) -> None:
        super().__init__(llama())
        self._change = change

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        return self._change(super().__call__(inputs, cache))


MALFORMED: dict[str, tuple[Callable[[mx.array], Any], str]] = {
    "last row only": (lambda logits: logits[:, -1:], rf"shape \(1, 1, {VOCAB_SIZE}\)"),
    "no rows": (lambda logits: logits[:, :0], rf"shape \(1, 0, {VOCAB_SIZE}\)"),
    "last row without its axis": (lambda logits: logits[:, -1], rf"shape \(1, {VOCAB_SIZE}\)"),
    "no batch": (lambda logits: logits[0], rf"shape \(2, {VOCAB_SIZE}\)"),
    "an axis more": (lambda logits: logits[None], rf"shape \(1, 1, 2, {VOCAB_SIZE}\)"),
    "a batch of two": (lambda logits: mx.concatenate([logits, logits]), rf"shape \(2, 2, {VOCAB_SIZE}\)"),
    "no vocabulary": (lambda logits: logits[..., :0], r"shape \(1, 2, 0\)"),
    "a tuple": (lambda logits: (logits, None), "a tuple"),
    "an object": (lambda logits: object(), "an? object"),
    "nothing": (lambda logits: None, "a NoneType"),
    "whole numbers": (lambda logits: logits.astype(mx.int32), "int32"),
    "complex numbers": (lambda logits: logits.astype(mx.complex64), "complex64"),
}


@sweep("kind", MALFORMED)
@sweep("role", ["target", "draft"])
async def test_a_model_that_gives_no_logits_is_refused_when_it_is_opened(kind: str, role: str) -> None:
    change, got = MALFORMED[kind]
    pair = {"target": (TARGET, None), "draft": (TARGET, None), role: (Otherwise(change), None)}
    expected = rf"^{role} 'Otherwise' gave .*{got}.* for 2 tokens; .* of shape \(1, 2, V\)"
    with pytest.raises(ModelError, match=expected):
        await open_and_close(**pair)


async def test_a_model_that_does_not_fill_its_cache_is_refused_when_it_is_opened() -> None:
    class Forgetful(Wrapped):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return super().__call__(inputs)

    with pytest.raises(ModelError, match="target 'Forgetful' leaves 0 tokens in its cache after 2"):
        await open_and_close((Forgetful(llama()), None))


# --- checks at any time ---------------------------------------------------------------------------


def test_a_probe_closes_its_sequence_whatever_comes() -> None:
    model = ScriptedModel(truthful, fails={"feed": [2], "check": [2]})
    probe(model)
    with pytest.raises(ModelError, match="cannot process 2 tokens: ScriptedFailure: feed 2 failed") as raised:
        probe(model)
    assert isinstance(raised.value.__cause__, ScriptedFailure)
    with pytest.raises(ModelError, match="RewindError: check 2 failed"):
        probe(model)
    probe(model)
    assert [sequence.is_closed for sequence in model.sequences] == [True] * 4
    assert model.misuses == []


def test_a_probe_sees_a_model_that_has_become_another() -> None:
    wrapped = Otherwise(lambda logits: logits)
    model = MLXModel(wrapped, CacheOptions())
    probe(model)
    for change, shape in (
        (lambda logits: logits[..., 1:], rf"\(2, {VOCAB_SIZE - 1}\)"),
        (lambda logits: logits[:, -1:], rf"\(1, {VOCAB_SIZE}\)"),
    ):
        wrapped._change = change
        with pytest.raises(ModelError, match=f"the model gave an array of shape {shape}"):
            probe(model)


# --- phi3small, which writes beyond a small vocabulary --------------------------------------------

PHI3SMALL: dict[str, Any] = {
    "model_type": "phi3small",
    "hidden_size": 32,
    "dense_attention_every_n_layers": 2,
    "ff_intermediate_size": 48,
    "gegelu_limit": 20.0,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_norm_epsilon": 1e-5,
}
TOO_SMALL = "phi3small with a vocab_size of 1000.* at least 100352"


@sweep("vocab_size, says", [(1000, TOO_SMALL), (100_352, "cannot load target")])
async def test_a_phi3small_that_would_crash_the_process_is_refused_by_its_configuration(vocab_size, says, tmp_path):
    # There are no weights in the file, so nothing can have been loaded.
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (tmp_path / "config.json").write_text(json.dumps(PHI3SMALL | {"vocab_size": vocab_size}))
    with pytest.raises(ModelError, match=says):
        await open_and_close(tmp_path)


async def test_a_phi3small_that_would_crash_the_process_is_refused_where_it_is_built_already() -> None:
    class Own(phi3small.Model):
        pass

    for kind in (phi3small.Model, Own):
        model = kind(phi3small.ModelArgs(**PHI3SMALL, vocab_size=1000))
        for opened in (model, Wrapped(model)):
            with pytest.raises(ModelError, match=f"draft '{type(opened).__name__}' is a {TOO_SMALL}"):
                await open_and_close((TARGET, None), (opened, None))
