"""Pairs with the cost of real ones and no download: random weights in the shape of models that people use.

The passes cost what those of such models do. The texts are artificial: a table gives the successor of each token,
whatever stands before it, and the drafter knows each entry of the table with a given probability. Both models compute
their logits, and then set the successor's to lead. So the text is the same in every number format, and all ways to
decode it (mlx-lm's too) have the same acceptance. The drafter is always sure, so its confidence tells nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.model import quantize_weights
from protocol.errors import ModelError
from runtime.bench.small_models import WrappedModel, drawn_model, weights_of
from runtime.loading.device import device_memory

# The part of the memory that the weights may take: caches and passes need some.
MAX_PART_OF_MEMORY = 0.75

# From a token to its successor: prime, so that a text visits every token before it repeats.
STRIDE = 7919
# The leading logit; those of random weights are far below.
LEAD = 100.0

# Prompts of a shape, which has no tokenizer.
PROMPTS = tuple(tuple(range(start, start + 64)) for start in range(0, 256, 16))


@attrs.frozen
class Shape:
    """The shape of a model: its family's module in mlx-lm, and the model's arguments."""

    family: str
    arguments: Mapping[str, Any]

    def lazy_model(self, seed: int, dtype: str, quantization: Mapping[str, Any] | None, **arguments: int) -> Module:
        """A model of this shape, except for some arguments, with weights that are not evaluated yet."""
        model = drawn_model(self.family, seed, **{**self.arguments, **arguments})
        model.set_dtype(getattr(mx, dtype))
        if quantization is not None:
            quantize_weights(model, **quantization)
        return model


_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "vocab_size"),
)


def _shape(family: str, sizes: tuple[int, ...], **more: Any) -> Shape:
    """A shape of the `_SIZES`, with further arguments."""
    arguments = dict(zip(_SIZES, sizes, strict=True))
    head_dim = arguments["hidden_size"] // arguments["num_attention_heads"]
    usual = {"head_dim": head_dim, "max_position_embeddings": 32_768, "rope_theta": 1e6}
    return Shape(family, arguments | usual | more)


# By name on the command line. Comments name the published models with these configurations.
SHAPES = {
    # Llama 3.1 8B
    "8b": _shape("llama", (32, 4096, 14336, 32, 8, 128_256)),
    # Qwen3 30B-A3B
    "30b-a3b": _shape(
        "qwen3_moe",
        (48, 2048, 6144, 32, 4, 151_936),
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    # Qwen3.5 4B
    "hybrid": _shape(
        "qwen3_5",
        (32, 2560, 9216, 16, 4, 248_320),
        head_dim=256,
        linear_num_value_heads=32,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        tie_word_embeddings=True,
    ),
    # Gemma 3 4B
    "sliding": _shape(
        "gemma3_text",
        (34, 2560, 10240, 8, 4, 262_208),
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=1024,
        sliding_window_pattern=6,
    ),
    # To try out everything else.
    "tiny": _shape("llama", (2, 64, 128, 2, 1, 512)),
}
# Qwen2.5 0.5B, with the target's vocabulary.
DRAFTER = _shape("qwen2", (24, 896, 4864, 14, 2, 151_936), tie_word_embeddings=True)
TINY_DRAFTER = _shape("qwen2", (1, 64, 64, 2, 1, 512), tie_word_embeddings=True)
# Kinds of drafters: the one above, or one layer of the target with its embeddings, as in MTP and EAGLE.
DRAFTERS = ("0.5b", "layer")


class ShapedModel(WrappedModel):
    """A model of some shape that sets the logit of each token's successor, by a table (V,)."""

    def __init__(self, model: Module, successors: mx.array, source_name: str) -> None:
        super().__init__(model)
        self._successors = successors  # with the underscore it is no parameter
        self.source_name = source_name

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(inputs, cache)
        return mx.put_along_axis(logits, self._successors[inputs][..., None], mx.array(LEAD, logits.dtype), axis=-1)


def shaped_pair(
    name: str,
    acceptance: float,
    dtype: str = "bfloat16",
    quantization: Mapping[str, Any] | None = None,
    draft_quantization: Mapping[str, Any] | None = None,
    *,
    drafter: str = DRAFTERS[0],
    memory_bytes: int | None = None,
) -> tuple[ShapedModel, ShapedModel]:
    """A target and its drafter, evaluated on this thread. If they do not fit, the target has fewer layers.

    Args:
        name: name of the target's shape, in `SHAPES`.
        acceptance: how often a guess of the drafter is right, in [0, 1].
        quantization, draft_quantization: `bits`, `group_size` and `mode` of the weights; None leaves them.
        drafter: its kind, one of `DRAFTERS`.
        memory_bytes: memory of the device; None asks it.

    Raises: ModelError: no layer of the target fits.
    """
    shape = SHAPES[name]
    vocab_size, all_layers = shape.arguments["vocab_size"], shape.arguments["num_hidden_layers"]
    if drafter == "layer":
        # A hybrid's MTP layer has full attention.
        layers = {"num_hidden_layers": 1} | dict.fromkeys({"full_attention_interval"} & shape.arguments.keys(), 1)
        draft = shape.lazy_model(1, dtype, draft_quantization, **layers)
    else:
        of_its_own = TINY_DRAFTER if name == "tiny" else DRAFTER
        draft = of_its_own.lazy_model(1, dtype, draft_quantization, vocab_size=vocab_size)
    room = MAX_PART_OF_MEMORY * (device_memory() if memory_bytes is None else memory_bytes) - _num_bytes(draft)
    target, num_layers = shape.lazy_model(0, dtype, quantization), all_layers
    while _num_bytes(target) > room:
        num_layers -= 1
        if num_layers == 0:
            raise ModelError(
                f"one layer of {name} needs {_num_bytes(target) / 1e9:.1f} GB beside the drafter, and there are "
                f"{max(0.0, room) / 1e9:.1f} GB for it; quantise it, or take another shape"
            )
        target = shape.lazy_model(0, dtype, quantization, num_hidden_layers=num_layers)
    successors = (mx.arange(vocab_size) + STRIDE) % vocab_size
    is_wrong = mx.random.uniform(shape=(vocab_size,), key=mx.random.key(2)) >= acceptance
    guesses = (successors + is_wrong) % vocab_size
    cut = "" if num_layers == all_layers else f", {num_layers} of {all_layers} layers, for lack of memory"
    drafter_name = "one layer" if drafter == "layer" else "tiny" if name == "tiny" else drafter
    target_bits, draft_bits = (
        dtype if each is None else f"{each['bits']} bits" for each in (quantization, draft_quantization)
    )
    guessing = f"guesses right with probability {acceptance:g}"
    pair = (
        ShapedModel(target, successors, f"{name} ({target_bits}, random weights{cut})"),
        ShapedModel(draft, guesses, f"{drafter_name} ({draft_bits}, random weights, {guessing})"),
    )
    for model in pair:
        # One by one, since each is drawn in float32.
        for _, weight in weights_of(model):
            mx.eval(weight)
    return pair


def _num_bytes(model: Module) -> int:
    return sum(weight.nbytes for _, weight in weights_of(model))
