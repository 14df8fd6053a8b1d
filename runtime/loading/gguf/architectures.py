"""Architectures in GGUF files that mlx-lm has: configurations from metadata, and what differs in the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from protocol.errors import ModelError
from protocol.reprs import shown
from runtime.loading.gguf.container import AGAIN, Container

# The dtypes that `model_config` may ask for.
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}

# Frequencies of the rotary embedding, which are in the configuration of an mlx-lm model: no weights.
_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = ROPE_TENSORS = (
    "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight",
)  # fmt: skip


@attrs.frozen
class Metadata:
    """The keys of a container that begin with the name of its architecture, without it."""

    container: Container
    prefix: str

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key. Raises: ModelError: it is of another type."""
        return self.container.get(f"{self.prefix}.{key}", kind, default)

    def need(self, key: str, kind: type) -> Any:
        """As `get`, for a key that must be there. Raises: ModelError: it is not."""
        if (value := self.get(key, kind)) is None:
            raise ModelError(f"{self.container.named} has no {self.prefix}.{key}; {AGAIN}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A size of the model, in [1, 2**31). Raises: ModelError: it is missing or out of that range."""
        value: int = self.need(key, int) if default is None else self.get(key, int, default)
        if not 1 <= value < 2**31:
            raise self.fault(key, f"{value}, which is no size of a model")
        return value

    def fault(self, key: str, what: str) -> ModelError:
        """The error about the value of a key."""
        return ModelError(f"{self.container.named} has {self.prefix}.{key} {what}; {AGAIN}")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        default = self.size("embedding_length") // self.size("attention.head_count")
        return self.size("attention.key_length", default)


def _llama(metadata: Metadata) -> dict[str, Any]:
    if metadata.get("expert_count", int, 0):
        raise ModelError(
            f"{metadata.container.named} is a llama with {metadata.get('expert_count', int)} experts "
            "(Mixtral), which cannot be loaded from GGUF; give the model in Hugging Face layout"
        )
    tensors = metadata.container.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "num_experts": metadata.need("expert_count", int),
        "num_experts_per_tok": metadata.need("expert_used_count", int),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length", int),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _scalar_of_queries(metadata: Metadata, num_layers_of_27b: int) -> float:
    """What the root of scales the queries of a Gemma: no key has it, and it differs in the models of 27B."""
    if metadata.need("block_count", int) == num_layers_of_27b:
        return float(metadata.need("embedding_length", int) / metadata.need("attention.head_count", int))
    return float(metadata.head_dim)


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _scalar_of_queries(metadata, 46),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    pattern = metadata.container.metadata.get(f"{metadata.prefix}.attention.sliding_window_pattern", 6)
    window = metadata.get("attention.sliding_window", int)
    return {
        "query_pre_attn_scalar": _scalar_of_queries(metadata, 62),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", float, 10_000.0),
        "sliding_window": 512 if window is None else window,
        # Without a window, every layer is a global one.
        "sliding_window_pattern": 1 if window is None else pattern if isinstance(pattern, int) else 6,
        "rope_theta": metadata.get("rope.freq_base", float, 1_000_000.0),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    context = metadata.get("context_length", int, 4096)
    return {
        "partial_rotary_factor": metadata.get("rope.dimension_count", int, metadata.head_dim) / metadata.head_dim,
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length", int, context),
    }


@attrs.frozen
class Architecture:
    """What is special about an architecture."""

    model_type: str  # mlx-lm's name of it
    extra: Callable[[Metadata], dict[str, Any]] = lambda _: {}  # values of the configuration beyond the common ones
    is_permuted: bool = False  # rows of queries and keys are stored for rotary embeddings of adjacent pairs
    norm_offset: float = 0.0  # what is added to the weights of norms in the file, and by mlx-lm's norm itself
    suits_float16: bool = False  # activations are known to stay in its range


ARCHITECTURES = {
    "gemma": Architecture("gemma", norm_offset=1.0),
    "gemma2": Architecture("gemma2", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", _gemma3, norm_offset=1.0),
    "llama": Architecture("llama", _llama, is_permuted=True, suits_float16=True),
    "olmo2": Architecture("olmo2"),
    "phi3": Architecture("phi3", _phi3),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "smollm3": Architecture("smollm3", _llama, is_permuted=True),
}


def architecture_of(container: Container) -> tuple[str, Architecture]:
    """The architecture of a model, with its name in the file. Raises: ModelError: it is not among those known."""
    name = container.get("general.architecture", str)
    if (architecture := ARCHITECTURES.get(name)) is None:
        raise ModelError(
            f"{container.named} has the architecture {shown(name)}, and GGUF models can be of "
            f"{', '.join(ARCHITECTURES)}; give the model in Hugging Face layout"
        )
    return name, architecture


def config_of(container: Container) -> dict[str, Any]:
    """The configuration of a model, as config.json would have it. Raises: ModelError: it is not known, or damaged."""
    name, architecture = architecture_of(container)
    metadata = Metadata(container, name)
    embedding = container.tensors.get("token_embd.weight")
    num_heads = metadata.size("attention.head_count")
    num_kv_heads = metadata.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.fault("attention.head_count_kv", f"{num_kv_heads}, which does not divide {num_heads} heads")
    tokens = container.metadata.get("tokenizer.ggml.tokens") or ()
    context = metadata.get("context_length", int)
    return {
        "model_type": architecture.model_type,
        "hidden_size": metadata.size("embedding_length"),
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": _num_layers(metadata),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": metadata.head_dim,
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon", float),
        "vocab_size": len(tokens) if embedding is None else embedding.shape[0],
        "rope_theta": metadata.get("rope.freq_base", float, 10_000.0),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "output.weight" not in container.tensors,
        **({} if context is None else {"max_position_embeddings": context}),
        **architecture.extra(metadata),
    }


def _num_layers(metadata: Metadata) -> int:
    """The number of layers, of each of which the file must have tensors: one that is wrong could exhaust the memory."""
    num_layers, tensors = metadata.size("block_count"), metadata.container.tensors
    present = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if tensors and len(present) < num_layers:
        raise metadata.fault("block_count", f"{num_layers}, and tensors of {len(present)} layers")
    return num_layers


def _rope_scaling(metadata: Metadata) -> dict[str, Any] | None:
    tensors = metadata.container.tensors
    if _FACTORS in tensors:
        # Llama 3's: a factor for each frequency. mlx-lm's longrope takes any, and by itself scales nothing else.
        factors = _values(metadata, _FACTORS)
        context = metadata.get("context_length", int)
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context,
        }
    if _LONG_FACTORS in tensors:
        long = _values(metadata, _LONG_FACTORS)
        short = _values(metadata, _SHORT_FACTORS) if _SHORT_FACTORS in tensors else long
        return {"type": "longrope", "long_factor": long, "short_factor": short}
    factor = metadata.get("rope.scaling.factor", float, metadata.get("rope.scale_linear", float, 1.0))
    # The older key had no type beside it.
    kind = metadata.get("rope.scaling.type", str, "linear" if metadata.get("rope.scale_linear", float) else "none")
    if kind in ("none", "longrope") or factor == 1.0:
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind != "yarn":
        raise ModelError(
            f"{metadata.container.named} has the unknown {metadata.prefix}.rope.scaling.type "
            f"{shown(kind)}; known are linear, longrope and yarn"
        )
    optional = {
        "original_max_position_embeddings": metadata.get("rope.scaling.original_context_length", int),
        "beta_fast": metadata.get("rope.scaling.yarn_beta_fast", float),
        "beta_slow": metadata.get("rope.scaling.yarn_beta_slow", float),
    }
    return {"type": "yarn", "factor": factor} | {key: value for key, value in optional.items() if value is not None}


def _values(metadata: Metadata, name: str) -> list[float]:
    tensor = metadata.container.tensors[name]
    if tensor.type is not Type.F32:
        raise ModelError(f"{metadata.container.named} has {name} in {tensor.type.name}, not in F32")
    return [float(value) for value in np.ascontiguousarray(tensor.data).view("<f4").ravel()]


def is_on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def dtype_of(container: Container, architecture: Architecture, wanted: Any) -> mx.Dtype:
    """The dtype of a model's activations and of all weights that are not packed: the `wanted` one by name; else float32
    on the CPU, which is slow in all others; else that of the file, but bfloat16 where float16 may overflow.
    """
    if wanted is not None:
        if wanted not in _DTYPES:
            raise ModelError(f"the dtype of a GGUF model must be {', '.join(_DTYPES)}, got {shown(wanted)}")
        return _DTYPES[wanted]
    types = {tensor.type for tensor in container.tensors.values() if len(tensor.shape) > 1}
    if types <= {Type.F32} or is_on_cpu():
        return mx.float32
    return mx.float16 if architecture.suits_float16 and Type.BF16 not in types else mx.bfloat16
