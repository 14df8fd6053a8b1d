"""GGUF files as models: logits of every family, quantised blocks, frequencies, and what cannot be loaded."""

from pathlib import Path
from typing import Any

import gguf_files
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from mlx.utils import tree_flatten
from sweeps import sweep

import runtime
from runtime.loading.gguf.blocks import floats_of, packed
from runtime.loading.gguf.container import GGUFTensor
from runtime.loading.gguf.weights import load_gguf

TOKENS = mx.array([[5, 17, 3, 60, 8, 41, 22, 9, 33, 2, 71, 64, 12, 50, 28, 19, 7, 90, 1, 45]])
WITH_BIASES = {"attention_bias": True, "mlp_bias": True}
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def difference(one: Any, other: Any) -> float:
    a, b = one(TOKENS).astype(mx.float32), other(TOKENS).astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


# Biases of a permuted family are permuted, too.
@sweep("family, options", [*((name, {}) for name in gguf_files.FAMILIES), ("llama", WITH_BIASES)])
def test_every_family_has_the_logits_of_the_same_weights_in_mlx_lm(family: str, options: Any, tmp_path: Path) -> None:
    model = gguf_files.model_of(family, **options)
    loaded, tokenizer = load_gguf(gguf_files.write_model(tmp_path / "model.gguf", family, model))
    assert difference(loaded, model) < 1e-5
    assert tokenizer.eos_token_ids == {95}


@sweep("kind", QUANTISED)
@sweep("family", ["llama", "qwen3_moe", "gemma2"])
def test_quantised_blocks_stay_packed_and_keep_their_values(kind: str, family: str, tmp_path: Path) -> None:
    model, type = gguf_files.model_of(family), GGMLQuantizationType[kind]
    tensors = gguf_files.tensors_of(family, model)
    types = {name: type for name, values in tensors.items() if values.ndim > 1 and "gate_inp" not in name}
    file = gguf_files.write_model(tmp_path / "model.gguf", family, model, types=types)
    as_they_are, _ = load_gguf(file, model_config={"expand": False, "dtype": "float32"})
    expanded, _ = load_gguf(file, model_config={"expand": True, "dtype": "float32"})
    assert difference(as_they_are, expanded) < 1e-5
    assert {weight.dtype for _, weight in tree_flatten(as_they_are.parameters())} == {mx.uint32, mx.float32}
    assert all(weight.dtype == mx.float32 for _, weight in tree_flatten(expanded.parameters()))


@sweep("kind", [*QUANTISED, "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL", "BF16", "F16"])
def test_blocks_of_every_type_have_the_values_that_gguf_dequantises(kind: str) -> None:
    type = GGMLQuantizationType[kind]
    size, num_bytes = GGML_QUANT_SIZES[type]
    numbers = np.random.default_rng(7)
    blocks = numbers.integers(0, 256, (6, 4 * 256 // size, num_bytes), np.uint8)
    # Bytes that are read as a factor in half precision are those of a sane one, wherever the type has them.
    if kind not in ("BF16", "F16"):
        for begin in {"Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82)}.get(kind, (0, 2)):
            if kind not in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL") or begin == 0:
                factors = numbers.uniform(0.5, 1.5, blocks.shape[:2]).astype(np.float16)
                blocks[..., begin : begin + 2] = factors[..., None].view(np.uint8)
    else:
        blocks = numbers.normal(size=(6, 4, 256)).astype(np.float16).view(np.uint8).reshape(6, -1, num_bytes)
    tensor = GGUFTensor("t", type, (6, 1024), blocks.reshape(6, -1))
    expected = dequantize(tensor.data.view(np.float16) if kind == "F16" else tensor.data, type).reshape(6, 1024)
    np.testing.assert_array_equal(np.array(floats_of(tensor, mx.float32)), expected)
    block = packed(tensor, mx.float32)
    assert (block is not None) == (kind in (*QUANTISED, "Q4_K", "Q5_K"))
    if block is not None:
        values = mx.dequantize(block.weight, block.scales, block.biases, group_size=32, bits=block.bits)
        np.testing.assert_allclose(np.array(values), expected, rtol=1e-6, atol=1e-4)


def test_frequencies_of_llama_3_come_from_the_file(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
    model = gguf_files.model_of("llama", rope_scaling=scaling)
    plain = 10_000.0 ** (mx.arange(0, 32, 2) / 32)
    factors = np.array(model.layers[0].self_attn.rope._freqs / plain)
    assert factors.max() == pytest.approx(8.0)
    file = gguf_files.write_model(tmp_path / "model.gguf", "llama", model, extra={"rope_freqs.weight": factors})
    assert difference(load_gguf(file)[0], model) < 1e-5
    assert difference(load_gguf(gguf_files.write_model(tmp_path / "no.gguf", "llama", model))[0], model) > 1e-3


@sweep(
    "family, keys, scaling",
    [
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"type": "linear", "factor": 4.0}),
        ("llama", {"rope.scale_linear": 4.0}, {"type": "linear", "factor": 4.0}),
        ("gemma3_text", {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"type": "linear", "factor": 8.0}),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ("qwen2", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
    ],
)
def test_positions_are_scaled_as_the_metadata_says(family: str, keys: Any, scaling: Any, tmp_path: Path) -> None:
    model = gguf_files.model_of(family, rope_scaling=scaling)
    prefix = gguf_files.FAMILIES[family].architecture
    changes = {f"{prefix}.{key}": value for key, value in keys.items()}
    loaded, _ = load_gguf(gguf_files.write_model(tmp_path / "model.gguf", family, model, changes=changes))
    assert difference(loaded, model) < 1e-5


def test_phi_3_takes_long_factors_from_tensors(tmp_path: Path) -> None:
    factors = np.linspace(1, 4, 8, dtype=np.float32)
    scaling = {"type": "longrope", "long_factor": factors.tolist(), "short_factor": [1.0] * 8}
    model = gguf_files.model_of("phi3", rope_scaling=scaling, original_max_position_embeddings=128)
    file = gguf_files.write_model(
        tmp_path / "model.gguf",
        "phi3",
        model,
        changes={"phi3.rope.scaling.original_context_length": 128},
        extra={"rope_factors_long.weight": factors, "rope_factors_short.weight": np.ones(8, np.float32)},
    )
    assert difference(load_gguf(file)[0], model) < 1e-5


@sweep(
    "family, type, on_cpu, expected",
    [
        ("llama", "F32", False, "float32"),
        ("llama", "Q8_0", False, "float16"),
        ("llama", "BF16", False, "bfloat16"),
        ("gemma2", "F16", False, "bfloat16"),
        ("gemma2", "Q4_0", True, "float32"),
    ],
)
def test_dtype_suits_device_and_family(family, type, on_cpu, expected, tmp_path, monkeypatch):
    model, kind = gguf_files.model_of(family), GGMLQuantizationType[type]
    types = {name: kind for name, values in gguf_files.tensors_of(family, model).items() if values.ndim > 1}
    file = gguf_files.write_model(tmp_path / "model.gguf", family, model, types=types)
    if not on_cpu:
        monkeypatch.setattr("runtime.loading.gguf.architectures.is_on_cpu", lambda: False)
    loaded, _ = load_gguf(file)
    assert loaded.model.norm.weight.dtype == getattr(mx, expected)


def test_quantize_quantises_what_the_file_has_as_floats(tmp_path: Path) -> None:
    model = gguf_files.model_of("llama")
    types = {"token_embd.weight": GGMLQuantizationType.Q8_0}
    file = gguf_files.write_model(tmp_path / "model.gguf", "llama", model, types=types)
    wanted = {"bits": 4, "group_size": 64, "mode": "affine"}
    loaded, _ = load_gguf(file, quantize=wanted, model_config={"expand": False})
    assert (loaded.model.embed_tokens.bits, loaded.model.layers[0].mlp.up_proj.bits) == (8, 4)
    types = {name: GGMLQuantizationType.Q8_0 for name, v in gguf_files.tensors_of("llama", model).items() if v.ndim > 1}
    file = gguf_files.write_model(tmp_path / "all.gguf", "llama", model, types=types)
    with pytest.raises(runtime.ModelError, match="quantised already; leave quantize out"):
        load_gguf(file, quantize=wanted, model_config={"expand": False})


@sweep(
    "family, changes, without, complaint",
    [
        ("llama", {"general.architecture": "mamba"}, (), "'model.gguf' has the architecture 'mamba', and .* gemma, "),
        ("llama", {"llama.expert_count": 8}, (), "a llama with 8 experts"),
        ("llama", {"llama.embedding_length": None}, (), "has no llama.embedding_length; download"),
        ("llama", {"llama.block_count": "two"}, (), "has 'two' as llama.block_count, which is of another type"),
        ("llama", {"llama.block_count": 4_000_000_000}, (), "has llama.block_count 4000000000, which is no size"),
        ("llama", {"llama.block_count": 9_000}, (), "has llama.block_count 9000, and tensors of 2 layers"),
        ("llama", {"llama.attention.head_count": 0}, (), "has llama.attention.head_count 0, which is no size"),
        ("llama", {"llama.attention.head_count_kv": 3}, (), "head_count_kv 3, which does not divide 2 heads"),
        ("llama", {"llama.block_count": 1}, (), r"tensor blk.1.\w+.weight, which is of no use to mlx-lm's llama"),
        ("llama", {"llama.feed_forward_length": 96}, (), r"blk.0.ffn_gate.weight in the shape \[128, 64\]"),
        ("llama", {}, ("blk.1.attn_k.weight",), "has no tensor blk.1.attn_k.weight; download"),
        ("qwen2", {}, ("blk.0.attn_q.bias",), "has no tensor blk.0.attn_q.bias"),
        ("gemma3_text", {}, ("output_norm.weight",), "has no tensor output_norm.weight"),
        ("qwen2", {"qwen2.rope.scaling.type": "x", "qwen2.rope.scaling.factor": 2.0}, (), "rope.scaling.type 'x'; kn"),
    ],
)
def test_what_cannot_be_loaded_is_named(family, changes, without, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = gguf_files.model_of(family)
    file = gguf_files.write_model(tmp_path / "model.gguf", family, model, changes=changes, without=without)
    with pytest.raises(runtime.ModelError, match=complaint):
        load_gguf(Path(file.name))


@sweep("config, complaint", [({"dtype": "int8"}, "dtype of a GGUF model must be"), ({"expand": 1}, "must be true or")])
def test_values_of_its_own_configuration_are_checked(config: Any, complaint: str, tmp_path: Path) -> None:
    file = gguf_files.write_model(tmp_path / "model.gguf", "llama", gguf_files.model_of("llama"))
    with pytest.raises(runtime.ModelError, match=complaint):
        load_gguf(file, model_config=config)
