"""Targets and their greedy texts by mlx-lm, the reference; and a drafter that is often right."""

from __future__ import annotations

import functools

import mlx.nn as nn
from models import greedy, llama, near, prompt_of

PROMPT = tuple(prompt_of(33))


@functools.cache
def target() -> nn.Module:
    return llama()


@functools.cache
def drafter() -> nn.Module:
    return near(llama(), noise=0.05)


@functools.cache
def text(num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return greedy(target(), prompt, num_tokens)


# --- any model ------------------------------------------------------------------------------------

SHORT_PROMPT = [11, 7, 52, 29, 40]
NUM_TOKENS = 48
# Rounding in float32 moves a tiny model's logits (of about 5) by up to 1e-4.
CLEAR_LEAD = 2e-4


def greedy_text(model: nn.Module) -> list[int]:
    """A prompt and its greedy continuation by mlx-lm; asserts that it is clear at every step, and varied."""
    text = SHORT_PROMPT + greedy(model, SHORT_PROMPT, NUM_TOKENS, clear_lead=CLEAR_LEAD)
    assert len(set(text)) > 12, "this text is too monotonous to show an error"
    return text
