"""Greedy text takes the argmax of the model's logits, and leaves mlx-lm's text only where rounding decides.

`generate_step` takes the argmax of log-probabilities that were rounded to the type of the logits. Where logits are near
each other and small beside the logarithm of the vocabulary's size, two of them that differ have the same rounded
log-probability, and mlx-lm takes the first of these tokens, in float32 as well. That needs no drafter.

In bfloat16, greedy text with a drafter equals the text without one, or leaves it where rounding decides.
A pass over several tokens may sum in another order than single passes, and so choose another token where two nearly
tie; then neither is wrong. Whether that happens depends on the kernels: MLX's CPU kernels give the same bits at every
width, GPU kernels do not. The texts are therefore compared as this machine makes them, and once more with a target
whose wide passes round differently from its narrow ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import architectures
import attrs
import mlx.core as mx
import mlx.nn as nn
import models
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from models import Wrapped, near, prompt_of
from sweeps import sweep

import runtime

NUM_TOKENS = 40

# Seeds of weights and prompts. With these, some texts depend on how wide passes round.
SEEDS = {"llama": (0, 1), "qwen3": (0, 1), "gemma3_text": (0, 1), "mamba": (0, 1), "lfm2": (3, 5)}

# The distance between neighbouring bfloat16 numbers, relative to their size.
RESOLUTION = 2**-8

FAMILIES: dict[str, Callable[[int], nn.Module]] = {
    "llama": models.llama,
    "qwen3": models.qwen3,
    "gemma3_text": models.gemma3_text,
    "mamba": models.mamba,
    "lfm2": lambda seed: architectures.build("lfm2", seed=seed),
}


@attrs.frozen
class Pair:
    """A target in bfloat16, the same weights in float32, and a drafter that is right some of the time."""

    target: nn.Module
    exact: nn.Module
    draft: nn.Module


@functools.cache
def pair(family: str, seed: int) -> Pair:
    target, exact = FAMILIES[family](seed), FAMILIES[family](seed)
    draft = near(target, noise=0.05)
    for model in (target, draft):
        model.set_dtype(mx.bfloat16)
    # Rounded first, so that the two differ by the rounding of the passes only.
    exact.update(tree_map(lambda weight: weight.astype(mx.float32), target.parameters()))
    mx.eval(target, exact, draft)
    return Pair(target, exact, draft)


class RoundsOtherwise(Wrapped):
    """Like the wrapped model, but passes over several tokens are in float32."""

    def __init__(self, model: nn.Module, exact: nn.Module) -> None:
        super().__init__(model)
        self.exact = exact

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if inputs.shape[1] == 1:
            return super().__call__(inputs, cache)
        return self.exact(inputs, cache=cache).astype(mx.bfloat16)


def plain(target: nn.Module, prompt: list[int]) -> list[int]:
    """mlx-lm's greedy text."""
    return [token for token, _ in generate_step(mx.array(prompt), target, max_tokens=NUM_TOKENS)]


async def ours(target: nn.Module, draft: nn.Module, prompt: list[int], lookahead: int) -> list[int]:
    async with runtime.open((target, None), (draft, None)) as rt:
        completion = await rt.generate(prompt, max_tokens=NUM_TOKENS, lookahead=lookahead)
    # Otherwise nothing was verified in a wide pass, or nothing was rewound.
    assert 0 < completion.statistics.accepted < completion.statistics.proposed
    return [token.id for token in completion.tokens]


class Flat(Wrapped):
    """Like the wrapped model, with logits that are near each other."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return super().__call__(inputs, cache) / 16


def argmax_text(target: nn.Module, prompt: list[int]) -> list[int]:
    """The text of the best logits, by passes over one token after the prompt."""
    cache, text = make_prompt_cache(target), prompt
    target(mx.array([prompt[:-1]]), cache=cache)
    for _ in range(NUM_TOKENS):
        text = [*text, mx.argmax(target(mx.array([text[-1:]]), cache=cache)[0, -1]).item()]
    return text[len(prompt) :]


@pytest.mark.parametrize("seed", [0, 1])
async def test_greedy_text_takes_the_best_logit_not_the_rounded_one(seed: int) -> None:
    target = Flat(pair("qwen3", seed).target)
    prompt = prompt_for(seed)
    async with runtime.open((target, None)) as rt:
        ours = [token.id for token in (await rt.generate(prompt, max_tokens=NUM_TOKENS)).tokens]
    assert ours == argmax_text(target, prompt)
    theirs = plain(target, prompt)
    at = next(i for i, tokens in enumerate(zip(ours, theirs, strict=True)) if tokens[0] != tokens[1])
    logits = target(mx.array([prompt + ours[:at]]))[0, -1]
    rounded = logits - mx.logsumexp(logits)
    assert rounded[ours[at]].item() == rounded[theirs[at]].item()
    assert logits[ours[at]].item() > logits[theirs[at]].item()
    assert theirs[at] < ours[at]


@attrs.frozen
class Tie:
    """Two different tokens for one position.

    Attributes:
        margin: how far the worse token is behind the best of all tokens, in float32.
        bound: the maximum margin if rounding alone decides. A pass in bfloat16 moves each logit by some error, measured
            here as its largest over the vocabulary. Each token was the best in one of two passes, so each is behind the
            best by at most two errors: its own and the best one's. One step of bfloat16 is added, since the errors of
            other kernels differ a little.
    """

    margin: float
    bound: float


def tie(models: Pair, text: list[int], tokens: tuple[int, int]) -> Tie:
    """The tie between two tokens after a text, which is read in one pass, whoever wrote it."""
    rounded = models.target(mx.array([text]))[0, -1].astype(mx.float32)
    exact = models.exact(mx.array([text]))[0, -1]
    error = mx.max(mx.abs(rounded - exact)).item()
    best = mx.max(exact).item()
    return Tie(
        margin=max(best - exact[token].item() for token in tokens),
        bound=2 * error + RESOLUTION * mx.max(mx.abs(exact)).item(),
    )


def departure(models: Pair, prompt: list[int], one: list[int], other: list[int]) -> Tie | None:
    """The tie at the first position where two texts differ; None if they do not."""
    assert len(one) == len(other) == NUM_TOKENS
    for i, tokens in enumerate(zip(one, other, strict=True)):
        if tokens[0] != tokens[1]:
            return tie(models, prompt + one[:i], tokens)
    return None


def prompt_for(seed: int) -> list[int]:
    return prompt_of(9, seed=2 * seed, vocab_size=architectures.VOCAB_SIZE)


@functools.cache
def greedy_text(family: str, seed: int) -> list[int]:
    return plain(pair(family, seed).target, prompt_for(seed))


@pytest.mark.slow
@sweep(("family", "lookahead"), zip(FAMILIES, itertools.cycle([1, 3])))
async def test_the_text_leaves_the_greedy_one_at_most_where_two_tokens_are_tied(family: str, lookahead: int) -> None:
    seed = SEEDS[family][0]
    models, prompt = pair(family, seed), prompt_for(seed)
    found = await ours(models.target, models.draft, prompt, lookahead)
    left = departure(models, prompt, greedy_text(family, seed), found)
    assert left is None or left.margin <= left.bound


@pytest.mark.slow
async def test_a_target_whose_wide_passes_round_differently_leaves_the_text_only_at_ties() -> None:
    ties = []
    for family, seeds in SEEDS.items():
        for seed in seeds:
            models, prompt = pair(family, seed), prompt_for(seed)
            target = RoundsOtherwise(models.target, models.exact)
            right = plain(target, prompt)
            left = departure(models, prompt, right, await ours(target, models.draft, prompt, 3))
            if left is not None:
                ties.append(left)
    assert ties, "no text was a matter of rounding; take other seeds"
    for left in ties:
        assert left.margin <= left.bound


@sweep("family", FAMILIES)
def test_most_tokens_are_not_tied_with_the_next_best(family: str) -> None:
    """Otherwise the tests above would accept wrong texts."""
    seed = SEEDS[family][0]
    models, prompt = pair(family, seed), prompt_for(seed)
    text = prompt + greedy_text(family, seed)
    lengths = range(len(prompt), len(text), 3)
    told_apart = 0
    for length in lengths:
        logits = models.exact(mx.array([text[:length]]))[0, -1]
        first, second = mx.argsort(-logits)[:2].tolist()
        close = tie(models, text[:length], (first, second))
        told_apart += close.margin > close.bound
    assert told_apart > len(lengths) / 2
