"""Tiny random models in float32: mlx-lm's own classes with a few thousand weights.

Their weights are drawn wide enough that texts are varied and the best token leads clearly. A text then does not depend
on the last bit of a sum.
"""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from runtime.bench.small_models import WrappedModel as Wrapped

VOCAB_SIZE = 80

# Rounding in float32 moves a tiny model's logits by about 1e-6.
CLEAR_LEAD = 1e-4


def llama(seed: int = 0, **changes: Any) -> nn.Module:
    """Full attention; one `KVCache` per layer."""
    return _built("llama", seed, head_dim=16, **changes)


def qwen3(seed: int = 0, **changes: Any) -> nn.Module:
    """Full attention with normalised queries and keys."""
    return _built("qwen3", seed, head_dim=16, rope_theta=10_000.0, tie_word_embeddings=False, **changes)


def gemma2(seed: int = 0, **changes: Any) -> nn.Module:
    """Soft-capped logits; its configuration states no context length."""
    return _built("gemma2", seed, embedding=0.1, head_dim=16, query_pre_attn_scalar=16.0, **changes)


def deepseek_v3(seed: int = 0, **changes: Any) -> nn.Module:
    """Latent attention, and a mixture of experts in the second layer."""
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"moe_intermediate_size": 32, "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return _built("deepseek_v3", seed, **{"num_key_value_heads": 2, **ranks, **experts, **groups, **changes})


def gemma3_text(seed: int = 0, *, window: int = 16, **changes: Any) -> nn.Module:
    """Three layers with a sliding window of `window` tokens, in rotating caches, and one with full attention."""
    sizes = {"num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 4}
    return _built("gemma3_text", seed, sliding_window=window, **{**sizes, **changes})


def sliding_llama(seed: int = 0, *, window: int = 16, **changes: Any) -> nn.Module:
    """One layer with full attention, one with a sliding window of `window` tokens."""
    kinds = ["full_attention", "sliding_attention"]
    return llama(seed, layer_types=kinds, sliding_window=window, **changes)


def mamba(seed: int = 0, **changes: Any) -> nn.Module:
    """A recurrent model: tokens cannot be removed from its cache."""
    sizes = {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
    return _built("mamba", seed, **{**sizes, **changes})


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def _built(name: str, seed: int, *, embedding: float = 2.0, **sizes: Any) -> nn.Module:
    module = import_module(f"mlx_lm.models.{name}")
    args = module.ModelArgs.from_dict(_SIZES | {"model_type": name} | sizes)
    return draw_weights(module.Model(args), seed, embedding=embedding)


def near(model: nn.Module, *, noise: float, seed: int = 1) -> nn.Module:
    """A copy with noise on its weights: a drafter that is right some of the time."""
    copy = type(model)(model.args)
    weights = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(weights))
    noisy = [
        (name, weight + noise * mx.std(weight) * mx.random.normal(weight.shape, key=key))
        for (name, weight), key in zip(weights, keys, strict=True)
    ]
    copy.update(tree_unflatten(noisy))
    mx.eval(copy.parameters())
    return copy


class Failing(Wrapped):
    """A model whose forward passes fail once `fails` is set."""

    fails = False

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if self.fails:
            raise ValueError("out of memory")
        return super().__call__(inputs, cache)


class Shifted(Wrapped):
    """A model that always prefers another token than the model that it wraps."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return mx.roll(super().__call__(inputs, cache), 1, axis=-1)


class Padded(Wrapped):
    """A model with extra rows of logits for ids that no token has; they never win."""

    PAD_LOGIT = -1e9

    def __init__(self, model: nn.Module, num_rows: int) -> None:
        super().__init__(model)
        self._num_rows = num_rows

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits = super().__call__(inputs, cache)
        return mx.pad(logits, [(0, 0), (0, 0), (0, self._num_rows)], constant_values=self.PAD_LOGIT)


def draw_weights(model: nn.Module, seed: int, *, embedding: float = 2.0) -> nn.Module:
    """Redraw the random weights at a scale at which the layers affect the next token."""
    parameters = tree_flatten(model.parameters())
    weights = [(name, weight) for name, weight in parameters if weight.ndim > 1 or name.endswith(".bias")]
    keys = mx.random.split(mx.random.key(seed), len(weights))
    drawn = []
    for (name, weight), key in zip(weights, keys, strict=True):
        # The last axis is the input, except in a depthwise convolution: (channels, width, 1).
        fan_in = weight.shape[-1] if weight.shape[-1] > 1 else weight.shape[-2]
        scale = 0.1 if weight.ndim == 1 else (embedding if "embed" in name else 2.0) / fan_in**0.5
        # A_log is a decay, which models set to fixed values.
        if mx.issubdtype(weight.dtype, mx.integer):  # packed
            drawn.append((name, mx.random.randint(0, mx.iinfo(weight.dtype).max, weight.shape, weight.dtype, key=key)))
        elif not name.endswith("A_log"):
            drawn.append((name, scale * mx.random.normal(weight.shape, weight.dtype, key=key)))
    model.update(tree_unflatten(drawn))
    mx.eval(model)  # frequencies of rotary embeddings, too, which are no parameters
    return model


def save(where: Path, model: nn.Module, *, word: str = "w") -> str:
    """Save a model, as `mlx_lm.load` reads it, with a tokenizer of words w0, w1, … of which none ends the text."""
    where.mkdir()
    config = {name: value for name, value in vars(model.args).items() if value is not None}
    (where / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(where / "model.safetensors"), dict(tree_flatten(model.parameters())))
    words = Tokenizer(WordLevel({f"{word}{i}": i for i in range(VOCAB_SIZE)}, unk_token=f"{word}0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(where)
    return str(where)


def prompt_of(length: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    return mx.random.randint(0, vocab_size, (length,), key=mx.random.key(1000 + seed)).tolist()


def greedy(
    model: nn.Module, prompt: Sequence[int], num_tokens: int, *, clear_lead: float = CLEAR_LEAD, **options: Any
) -> list[int]:
    """The text of mlx-lm's plain greedy decoding; asserts that the best token leads clearly at every step."""
    tokens = []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=num_tokens, **options):
        assert_leads(logprobs, clear_lead)
        tokens.append(token)
    return tokens


def assert_leads(logits: mx.array, clear_lead: float = CLEAR_LEAD) -> None:
    """Assert that the best token of (vocab_size,) logits leads by more than `clear_lead`."""
    second, first = mx.sort(mx.topk(logits.astype(mx.float32), 2)).tolist()
    assert first - second > clear_lead, "this text depends on rounding; take another seed"
