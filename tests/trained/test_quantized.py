"""Quantised drafters of every kind: from files that are quantised, and quantised as they are loaded."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import VOCAB_SIZE
from completions import open_and_close
from models import greedy
from sweeps import sweep
from trained_drafters import KINDS, make

import runtime
from actors.mlx.model import is_quantized
from actors.trained.drafter_model import TrainedDrafter

FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "4 bits": ({"bits": 4, "group_size": 32},),
    "8 bits": ({"bits": 8, "group_size": 32},),
    "mxfp4": ({"mode": "mxfp4"},),
    "nvfp4": ({"mode": "nvfp4"},),
    "mxfp8": ({"mode": "mxfp8"},),
    "each layer otherwise": ({"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 32}, {"mode": "nvfp4"}, {}),
}
PARTS = ("scales", "biases")
PROMPT = [1, 2, 3, 4, 5]


def write_quantized(folder: Path, to: Path, formats: tuple[dict[str, Any], ...]) -> tuple[Path, Path]:
    """Write a drafter quantised, each of its matrices in one of the formats. Returns: its folder, and that of the same
    drafter with the values that are left of it."""
    quantized, left = to / "quantized", to / "left"
    config = json.loads((folder / "config.json").read_text())
    for made in (quantized, left):
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps(config | {"quantization": formats[0]}))
    for file in folder.glob("*.safetensors"):
        packed: dict[str, mx.array] = {}
        values: dict[str, mx.array] = {}
        weights: dict[str, mx.array] = mx.load(str(file))
        # Experts are in one array.
        layers = list(dict.fromkeys(re.sub(r"experts\.\d+", "experts", name) for name in weights))
        for name, value in weights.items():
            how = formats[layers.index(re.sub(r"experts\.\d+", "experts", name)) % len(formats)]
            packed[name] = values[name] = value
            group_size = how.get("group_size", 16 if how.get("mode") == "nvfp4" else 32)
            # mlx-lm has no quantised routers.
            is_matrix = value.ndim == 2 and not name.endswith(".mlp.gate.weight")
            if is_matrix and how and value.shape[-1] % group_size == 0:
                packed[name], scales, *biases = mx.quantize(value, **how)
                values[name] = mx.dequantize(packed[name], scales, *biases, **how)
                module = name.removesuffix(".weight")
                packed |= {f"{module}.{part}": found for part, found in zip(PARTS, [scales, *biases], strict=False)}
        mx.save_safetensors(str(quantized / file.name), packed)
        mx.save_safetensors(str(left / file.name), values)
    return quantized, left


def logits_of(folder: Path, target: Any) -> tuple[TrainedDrafter, mx.array]:
    """The logits of a drafter after each token of a text, features being random."""
    drafter = TrainedDrafter(folder, target, VOCAB_SIZE)
    sequence = drafter.open_sequence(alongside_model=False)
    width = len(drafter.feature_layers) * 32
    sequence.give(0, mx.random.normal((9, width), key=mx.random.key(3)))
    given = sequence.feed(tuple(range(1, 11)), 10)
    assert given is not None
    return drafter, given


@sweep(("kind", "name"), [*((kind, "each layer otherwise") for kind in KINDS), *(("eagle3", name) for name in FORMATS)])
def test_quantised_files_give_the_logits_of_what_is_left_of_the_weights(kind: str, name: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path / "whole")
    quantized, left = write_quantized(tmp_path / "whole", tmp_path, FORMATS[name])
    drafter, given = logits_of(quantized, target)
    other, expected = logits_of(left, target)
    assert mx.allclose(given, expected, rtol=1e-4, atol=1e-4)
    expands = mx.default_device() == mx.cpu
    assert is_quantized(drafter.module) == (not expands)
    assert not is_quantized(other.module)
    assert expands or drafter.num_bytes < other.num_bytes


@sweep("kind", KINDS)
def test_every_kind_is_quantised_as_it_is_loaded(kind: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path)
    drafter = TrainedDrafter(tmp_path, target, VOCAB_SIZE)
    quantized = drafter.quantized({"bits": 8, "group_size": 32, "mode": "affine"})
    assert is_quantized(quantized.module)
    assert quantized.num_bytes < drafter.num_bytes


@sweep("kind", ["eagle3", "gemma4"])
async def test_texts_of_a_quantised_one_are_the_targets(kind: str, tmp_path: Path) -> None:
    target = make(kind, tmp_path)
    spec = runtime.ModelSpec(tmp_path, quantize={"bits": 8, "group_size": 32})
    async with runtime.open((target, None), spec) as rt:
        assert is_quantized(rt._draft.model.module)
        completion = await rt.generate(PROMPT, max_tokens=20, lookahead=3, ignore_eos=True)
        assert [token.id for token in completion.tokens] == greedy(target, PROMPT, 20)
        assert completion.statistics.proposed > 0
        assert rt.estimates.draft_seconds > 0


async def test_one_that_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    target = make("eagle3", tmp_path / "whole")
    folder, _ = write_quantized(tmp_path / "whole", tmp_path, FORMATS["4 bits"])
    with pytest.raises(runtime.ModelError, match="its weights are quantised already; leave quantize out"):
        await open_and_close((target, None), runtime.ModelSpec(folder, quantize=4))


@sweep("options", [{"adapter_path": "adapter"}, {"model_config": {"rope_theta": 1e6}}])
async def test_what_only_a_language_model_has_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    target = make("eagle3", tmp_path)
    with pytest.raises(runtime.SettingsError, match="leave out all but revision and quantize"):
        await open_and_close((target, None), runtime.ModelSpec(tmp_path, **options))
