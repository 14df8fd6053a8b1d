"""A target, a drafter that is often right, and the target's greedy text."""

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
