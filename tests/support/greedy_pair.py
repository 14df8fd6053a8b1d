"""Targets and their greedy texts by mlx-lm, the reference; and a drafter that is often right."""

import functools
import inspect
from typing import Any

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


# Settings with which a prompt takes several passes, and with which so small models are surely drafted for; and a text
# that is longer than any test reads.
SETTINGS = {"prefill_step_size": 8, "lookahead": 3}
LONG = {"max_tokens": 400, **SETTINGS}


async def the_next_text_is_right(rt: Any) -> None:
    """Assert that a runtime of any face is well, and its drafter."""
    completion = rt.generate(PROMPT, max_tokens=12, **SETTINGS)
    if inspect.isawaitable(completion):
        completion = await completion
    assert [token.id for token in completion.tokens] == text(12)
    assert completion.statistics.draft_failures == 0


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
