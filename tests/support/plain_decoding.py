"""mlx-lm's plain greedy decoding, as the reference."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

PROMPT = [11, 7, 52, 29, 40]


NUM_TOKENS = 72


# Rounding in float32 moves a tiny model's logits (of about 5) by up to 1e-4.
CLEAR_LEAD = 2e-4


def greedy(model: nn.Module) -> list[int]:
    """The prompt and its plain greedy continuation by mlx-lm; asserts that the best token leads clearly at every step.
    """
    text = list(PROMPT)
    for token, logprobs in generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS):
        assert_leads(logprobs)
        text.append(token)
    assert len(set(text)) > 12, "this text is too monotonous to show an error"
    return text


def assert_leads(logits: mx.array) -> None:
    second, first = mx.sort(mx.topk(logits.astype(mx.float32), 2)).tolist()
    assert first - second > CLEAR_LEAD, "this text is a matter of rounding; take another seed"
