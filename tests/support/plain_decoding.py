"""mlx-lm's plain greedy decoding, as the reference."""

from __future__ import annotations

import mlx.nn as nn
from models import greedy

PROMPT = [11, 7, 52, 29, 40]


NUM_TOKENS = 48


# Rounding in float32 moves a tiny model's logits (of about 5) by up to 1e-4.
CLEAR_LEAD = 2e-4


def greedy_text(model: nn.Module) -> list[int]:
    """The prompt and its greedy continuation by mlx-lm; asserts that it is clear at every step, and varied."""
    text = PROMPT + greedy(model, PROMPT, NUM_TOKENS, clear_lead=CLEAR_LEAD)
    assert len(set(text)) > 12, "this text is too monotonous to show an error"
    return text
