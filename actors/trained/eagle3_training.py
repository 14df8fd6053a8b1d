"""Training-time test: the logits of several draft steps at every position of a text at once, for training.

At step s the drafter has read s of its own hidden states. The query at position t attends to the keys of step 0 at
positions up to t, and to those of steps 1 … s at t, which are the steps that led there. So all positions are computed
in one pass a step.

Source: Li, Wei, Zhang and Zhang 2025, arXiv 2503.01840, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import mlx.core as mx

from actors.trained.kinds.eagle3 import Eagle3


@attrs.define
class _LayerSteps:
    """Keys and values of one layer, (B, heads, T, width of a head) for each step so far."""

    keys: list[mx.array] = attrs.field(factory=list)
    values: list[mx.array] = attrs.field(factory=list)


def logits_of_steps(model: Eagle3, features: mx.array, embedded: mx.array, num_steps: int) -> list[mx.array]:
    """The logits of each step.

    Args:
        model: the drafter.
        features: (B, T, layers · target's hidden size) of positions 0 … T - 1.
        embedded: (B, T + num_steps - 1, hidden size) embeddings of the tokens at positions 1 … T + num_steps - 1.
        num_steps: >= 1.

    Returns: for each step s, (B, T, draft_vocab_size) logits for the tokens at positions 2 + s … T + 1 + s; lazy.
    """
    length = features.shape[1]
    hidden = model.project(features)
    caches = [_LayerSteps() for _ in model.layers]

    def attend(index: int, inputs: mx.array) -> mx.array:
        return _attend(model.layers[index].self_attn, inputs, caches[index])

    given = []
    for step in range(num_steps):
        hidden, logits = model.step(hidden, embedded[:, step : step + length], attend)
        given.append(logits)
    return given


def _attend(attention: Any, inputs: mx.array, cache: _LayerSteps) -> mx.array:
    """The attention of a step, whose keys and values join the cache."""
    batch, length, _ = inputs.shape
    step = len(cache.keys)
    queries = _heads(attention.q_proj(inputs), attention.n_heads, getattr(attention, "q_norm", None))
    keys = _heads(attention.k_proj(inputs), attention.n_kv_heads, getattr(attention, "k_norm", None))
    values = _heads(attention.v_proj(inputs), attention.n_kv_heads, None)
    groups = attention.n_heads // attention.n_kv_heads
    # Step s at position t stands where position t + s does.
    queries = attention.rope(queries, offset=step)
    cache.keys.append(mx.repeat(attention.rope(keys, offset=step), groups, axis=1))
    cache.values.append(mx.repeat(values, groups, axis=1))
    is_later = mx.arange(length)[:, None] < mx.arange(length)
    text_scores = mx.where(is_later, -math.inf, attention.scale * (queries @ cache.keys[0].swapaxes(-1, -2)))
    own_scores = [attention.scale * (queries * own).sum(axis=-1, keepdims=True) for own in cache.keys[1:]]
    weights = mx.softmax(mx.concatenate([text_scores, *own_scores], axis=-1), axis=-1, precise=True)
    attended = weights[..., :length] @ cache.values[0]
    for i, own in enumerate(cache.values[1:]):
        attended = attended + weights[..., length + i : length + i + 1] * own
    merged = attended.swapaxes(1, 2).reshape(batch, length, -1)
    result: mx.array = attention.o_proj(merged)
    return result


def _heads(projected: mx.array, num_heads: int, norm: Any) -> mx.array:
    """(B, T, heads · width) → (B, heads, T, width)."""
    split = projected.reshape(*projected.shape[:2], num_heads, -1)
    return (split if norm is None else norm(split)).swapaxes(1, 2)
