"""Tiny GGUF files, written by PyPI `gguf` as llama.cpp's converter writes them, from mlx-lm's models."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from mlx.utils import tree_flatten

from runtime.bench.small_models import drawn_model

# Names of modules in GGUF files, by transformers'.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps",
    "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}
# Those of families with norms before and after both halves of a layer.
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@attrs.frozen
class Family:
    """A family as llama.cpp writes it: its name, and what its files have beyond the common keys."""

    architecture: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)  # of mlx-lm's model
    keys: Mapping[str, Any] = attrs.field(factory=dict)
    names: Mapping[str, str] = attrs.field(factory=dict)
    is_permuted: bool = False
    norm_offset: int = 0


TIED = {"tie_word_embeddings": True}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
WINDOWS = {"query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_pattern": 3, "num_hidden_layers": 3}
FAMILIES = {
    "llama": Family("llama", is_permuted=True),
    "qwen2": Family("qwen2", TIED),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family(
        "qwen3moe", EXPERTS, {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    ),
    "gemma": Family("gemma", norm_offset=1),
    "gemma2": Family("gemma2", {"query_pre_attn_scalar": 32}, names=FOUR_NORMS, norm_offset=1),
    "gemma3_text": Family(
        "gemma3",
        {**WINDOWS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        {"attention.sliding_window": 16, "attention.sliding_window_pattern": 3},
        names=FOUR_NORMS,
        norm_offset=1,
    ),
    "phi3": Family("phi3", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 16}),
    "smollm3": Family("smollm3", {"num_hidden_layers": 5}, is_permuted=True),
    "olmo2": Family("olmo2", {"num_key_value_heads": 2}, names=FOUR_NORMS),
}


def byte_level_fields(pre: str = "gpt-2") -> dict[str, Any]:
    """Keys of a tokenizer of single bytes, the last of whose tokens is special and ends a text."""
    tokens = [chr(ord("!") + i) for i in range(93)] + ["Ġ", "ab", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 95 + [3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 95,
    }


def write(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    types: Mapping[str, GGMLQuantizationType] | None = None,
    split: int = 0,
) -> Path:
    """Write a file, or `split` files of at most so many tensors each; None as a value leaves a key out."""
    writer = GGUFWriter(None if split else path, architecture, split_max_tensors=split)
    for name, value in keys.items():
        _add(writer, name, value)
    for name, values in tensors.items():
        kind = (types or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)


def keys_of(family: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that every family has, and its own."""
    kind = FAMILIES[family]
    common = {
        "block_count": arguments.get("num_hidden_layers", 2),
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 2,
        "attention.head_count_kv": arguments.get("num_key_value_heads", 1),
        "attention.key_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": arguments.get("rope_theta", 10_000.0),
    }
    return {f"{kind.architecture}.{name}": value for name, value in {**common, **kind.keys}.items()}


def tensors_of(family: str, model: nn.Module) -> dict[str, np.ndarray]:
    """The weights of a model, in names and order of a GGUF file."""
    kind, found = FAMILIES[family], {}
    for name, weight in tree_flatten(model.parameters()):
        values = np.array(weight.astype(mx.float32))
        module, _, end = name.rpartition(".")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module)
        names = {**NAMES, **kind.names}
        their = names[module] if layer is None else f"blk.{layer[1]}.{names[layer[2]]}"
        if kind.is_permuted and their.endswith(("attn_q", "attn_k")):
            num_heads = values.shape[0] // 32
            values = values.reshape(num_heads, 2, 16, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        found[f"{their}.{end}"] = values + kind.norm_offset if their.endswith("norm") else values
    return found


def model_of(family: str, seed: int = 0, **arguments: Any) -> nn.Module:
    """A tiny model of a family, with norms that are not all alike."""
    model = drawn_model(family, seed, **{**FAMILIES[family].arguments, **arguments})
    if hasattr(model, "sanitize") and "lm_head" in model and family == "gemma3_text":
        model.sanitize({})  # its output is tied as soon as the weights have none
    mx.eval(model.parameters())
    return model


def write_model(
    path: Path,
    family: str,
    model: nn.Module,
    *,
    changes: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    types: Mapping[str, GGMLQuantizationType] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    split: int = 0,
) -> Path:
    """Write a model of a family; `changes` replaces keys, `without` leaves tensors out, `extra` adds some."""
    keys = keys_of(family, FAMILIES[family].arguments) | byte_level_fields() | dict(changes or {})
    tensors = {**tensors_of(family, model), **(extra or {})}
    kept = {name: values for name, values in tensors.items() if name not in without}
    return write(path, FAMILIES[family].architecture, keys, kept, types, split)
