"""MTP layers: the logits of transformers' decoder layers in torch, as `make_mtp_cases.py` wrote them down; their texts."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from actors.trained.kinds.mtp import MTPReader, is_mtp, load_mtp
from actors.trained.kinds.target_parts import embedding_of, final_norm_of, head_of
from protocol.errors import ModelError

CASES = sorted(path for path in (Path(__file__).parent / "mtp").iterdir() if path.is_dir())
VOCAB_SIZE = 48


def target_of(case: Path) -> Any:
    """A target of the family, with the embedding, final norm and head of the case; its layers are random."""
    config = json.loads((case / "config.json").read_text())
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    target = module.Model(module.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = mx.load(str(case / "model.safetensors"))  # type: ignore[assignment]
    shared = {name: value for name, value in weights.items() if name.split(".")[1] in ("embed_tokens", "norm", "weight")}
    if case.name.startswith("qwen"):
        shared["model.norm.weight"] = shared["model.norm.weight"] + 1
    whole = "language_model." if case.name.startswith("qwen3_5") else ""
    target.load_weights([(whole + name, value) for name, value in shared.items()], strict=False)
    mx.eval(target.parameters())
    return target


def reader_of(folder: Path, target: Any) -> MTPReader:
    named = "the drafter"
    model = load_mtp(folder, target, named)
    return MTPReader(model, final_norm_of(target, named), embedding_of(target, named), head_of(target, named), VOCAB_SIZE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_logits_are_those_of_the_torch_layers(case: Path) -> None:
    reader = reader_of(case, target_of(case))
    expected: dict[str, mx.array] = mx.load(str(case / "expected.npz"))  # type: ignore[assignment]
    num_steps, num_tokens, _ = expected["logits"].shape
    tokens = expected["tokens"]
    for begin in range(num_tokens):
        cache = reader.make_cache()
        hidden = reader.project(expected["features"][: begin + 1])
        hidden, logits = reader.read(hidden, tokens[: begin + 1], cache)
        for step in range(num_steps):
            assert mx.allclose(logits[-1], expected["logits"][step, begin], rtol=1e-4, atol=1e-4), (begin, step)
            hidden, logits = reader.read(hidden[-1:], tokens[begin + 1 + step : begin + 2 + step], cache)
