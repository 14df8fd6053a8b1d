"""Training-time test: the logits of several draft steps at every position of a text at once, for training.

At step s the drafter has read s of its own hidden states. The query at position t attends to the keys of step 0 at
positions up to t, and to those of steps 1 … s at t, which are the steps that led there. So all positions are computed
in one pass a step.

Source: Li, Wei, Zhang and Zhang 2025, arXiv 2503.01840, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from actors.trained.kinds.eagle3 import Eagle3

_LayerSteps = list[tuple[mx.array, mx.array]]
"""Keys and values of one layer, (B, heads, T, width of a head) for each step so far."""


def logits_of_steps(model: Eagle3, features: mx.array, embedded: mx.array, num_steps: int) -> list[mx.array]:
    """For each step s, (B, T, draft_vocab_size) logits for the tokens at positions 2 + s … T + 1 + s; lazy.

    From (B, T, layers · target's hidden size) features of positions 0 … T - 1, and (B, T + num_steps - 1, hidden size)
    embeddings of the tokens at positions 1 … T + num_steps - 1.
    """
    length = features.shape[1]
    hidden = model.project(features)
    caches: list[_LayerSteps] = [[] for _ in model.layers]

    def attend(index: int, inputs: mx.array) -> mx.array:
        return _attend(model.layers[index].self_attn, inputs, caches[index])

    given = []
    for step in range(num_steps):
        hidden, logits = model.step(hidden, embedded[:, step : step + length], attend)
        given.append(logits)
    return given


def _attend(attention: Any, inputs: mx.array, cache: _LayerSteps) -> mx.array:
    batch, length, _ = inputs.shape
    step = len(cache)
    queries = _heads(attention.q_proj(inputs), attention.n_heads, getattr(attention, "q_norm", None))
    keys = _heads(attention.k_proj(inputs), attention.n_kv_heads, getattr(attention, "k_norm", None))
    values = _heads(attention.v_proj(inputs), attention.n_kv_heads, None)
    groups = attention.n_heads // attention.n_kv_heads
    # For the rotary embedding, step s at position t is at position t + s.
    queries = attention.rope(queries, offset=step)
    cache.append((mx.repeat(attention.rope(keys, offset=step), groups, axis=1), mx.repeat(values, groups, axis=1)))
    (text_keys, text_values), *own = cache
    is_later = mx.arange(length)[:, None] < mx.arange(length)
    text_scores = mx.where(is_later, -math.inf, attention.scale * (queries @ text_keys.swapaxes(-1, -2)))
    own_scores = [attention.scale * (queries * own_keys).sum(axis=-1, keepdims=True) for own_keys, _ in own]
    weights = mx.softmax(mx.concatenate([text_scores, *own_scores], axis=-1), axis=-1, precise=True)
    attended = weights[..., :length] @ text_values
    for i, (_, own_values) in enumerate(own, length):
        attended = attended + weights[..., i : i + 1] * own_values
    merged = attended.swapaxes(1, 2).reshape(batch, length, -1)
    result: mx.array = attention.o_proj(merged)
    return result


def _heads(projected: mx.array, num_heads: int, norm: Any) -> mx.array:
    """(B, T, heads · width) → (B, heads, T, width)."""
    split = projected.reshape(*projected.shape[:2], num_heads, -1)
    return (split if norm is None else norm(split)).swapaxes(1, 2)
