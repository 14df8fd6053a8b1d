"""Models of mlx-lm with random weights: small ones of families with their own kernels or caches, and any other."""

from __future__ import annotations

import importlib
import math
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache

VOCAB_SIZE = 96

# How far a nearby model's weights are from a model's own, as a fraction of the way to another model's.
NEARBY = 0.03

# Heads and states are multiples of 32, for which Metal has kernels. Families ignore arguments that they do not have.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_bias": False,
    "conv_kernel": 4,
    "use_conv_bias": True,
}

# By family: the arguments of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 32,
        "sliding_window": 16,
        "sliding_window_pattern": 3,
    },
    "mamba2": {
        "num_heads": 4,
        "intermediate_size": 128,
        "state_size": 32,
        "n_groups": 1,
        "time_step_limit": (0.001, 100.0),
        "time_step_rank": 4,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "conv_bias": True,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.5,
    },
}


def small_model(family: str, seed: int, **arguments: Any) -> Module:
    """A model of a family of mlx-lm's with random weights in float32, evaluated on this thread.

    The weights vary so much that the likeliest token leads clearly: a text does not depend on the last bit of a sum.
    """
    model = drawn_model(family, seed, **arguments)
    mx.eval(model.parameters())
    return model


def drawn_model(family: str, seed: int, **arguments: Any) -> Module:
    """As `small_model`, for any family of mlx-lm's, with weights that are not evaluated yet."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model: Module = module.Model(
        module.ModelArgs.from_dict(_COMMON | {"model_type": family} | FAMILIES.get(family, {}) | arguments)
    )
    leaves = weights_of(model)
    keys = mx.random.split(key=mx.random.key(seed), num=len(leaves))
    drawn = [(name, _drawn(name, weight, key)) for (name, weight), key in zip(leaves, keys, strict=True)]
    model.update(tree_unflatten(drawn))
    return model


def nearby_model(family: str, seed: int) -> Module:
    """A model that mostly agrees with `small_model` of the same family and seed, and so can draft for it."""
    model, other = small_model(family, seed), small_model(family, seed + 1)
    pairs = zip(weights_of(model), weights_of(other), strict=True)
    near = [(name, weight + NEARBY * (further - weight)) for (name, weight), (_, further) in pairs]
    model.update(tree_unflatten(near))
    mx.eval(model.parameters())
    return model


class WrappedModel(Module):
    """A wrapper around a model; subclasses change something about its passes."""

    def __init__(self, model: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model

    @property
    def args(self) -> Any:
        """The model's arguments."""
        return self.model.args

    @property
    def layers(self) -> Any:
        """The model's layers."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """The model's caches."""
        return make_prompt_cache(self.model)

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        return self.model(inputs, cache=cache)


def weights_of(model: Module) -> list[tuple[str, mx.array]]:
    """The weights of a model, by name."""
    return cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))


def _drawn(name: str, weight: mx.array, key: mx.array) -> mx.array:
    """Other values for a weight; the weight itself where its family does not initialise it at random."""
    if name.endswith("A_log"):
        decays = mx.log(mx.linspace(1.0, 8.0, weight.shape[0])).reshape(-1, *(1,) * (weight.ndim - 1))
        return mx.broadcast_to(decays, weight.shape)
    if weight.ndim > 1:
        # A kernel over one channel has a last axis of 1.
        scale = 2.0 / math.sqrt(max(weight.shape[-1], 4))
        return scale * mx.random.normal(weight.shape, weight.dtype, key=key)
    if name.endswith("bias"):
        return 0.1 * mx.random.normal(weight.shape, weight.dtype, key=key)
    return weight
