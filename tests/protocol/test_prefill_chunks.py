"""Prefill chunks: a pass reads as many prompt tokens as are cheap, and no more than fit into the time limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from architectures import build
from hypothesis import given
from hypothesis import strategies as st
from models import greedy, prompt_of
from scripted import ScriptedModel, continuation, priced, simulated, text_of, truthful
from sweeps import sweep

import runtime
from actors.workers.worker import Job
from protocol.prefill_chunks import (
    FIXED_CHUNK_TOKENS,
    MAX_CHUNK_TOKENS,
    MAX_PADDING,
    MAX_PASS_S,
    MIN_CHUNK_TOKENS,
    PRIOR_TOKENS,
    PrefillChunkSize,
    read_together,
)
from protocol.trace import Span


def sizes(seconds_of: Callable[[int], float], num_passes: int, *, is_expected: bool = False) -> list[int]:
    """The sizes of the first passes on a device whose passes take `seconds_of(size)`, as is expected or not."""
    chunk_size = PrefillChunkSize(seconds_of) if is_expected else PrefillChunkSize()
    passes = []
    for _ in range(num_passes):
        passes.append(chunk_size())
        chunk_size.observe(passes[-1], seconds_of(passes[-1]))
    return passes


@sweep(
    ("seconds_of", "is_expected", "passes"),
    [
        # Half a millisecond per token at every size: 384 of them fit into a fifth of a second. The first step is wider.
        (lambda n: 0.0005 * n, False, [16, 192, 256, 384, 384]),
        # Above 64 tokens, a token costs more.
        (lambda n: n * (0.0005 if n <= 64 else 0.0010), False, [16, 192, 24, 32, 48, 64, 96, 64, 64]),
        (lambda n: 0.005 + n * (0.0005 if n <= 64 else 0.0010), True, [64, 128, 96, 64, 64, 64]),
        # No size is tried that would not fit if each token cost the same, though the first takes 0.05 s more.
        (lambda n: 0.05 + 0.002 * n, False, [16, 24, 32, 48, 64, 64, 64, 64]),
        (lambda n: 0.0063 * n, False, [16, 24, 24, 24, 24]),
        (lambda n: 0.0090 * n, False, [MIN_CHUNK_TOKENS] * 5),
        (lambda n: 0.0500 * n, False, [MIN_CHUNK_TOKENS] * 5),  # too slow for any size
        # A fast device reads the most at once.
        (lambda n: 0.01 + n * 1e-5, False, [16, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, MAX_CHUNK_TOKENS]),
    ],
)
def test_sizes_grow_while_they_are_cheap_and_fit(seconds_of, is_expected, passes) -> None:
    assert sizes(seconds_of, len(passes), is_expected=is_expected) == passes


def test_the_first_size_follows_the_expected_price_of_a_pass() -> None:
    assert PrefillChunkSize(lambda tokens: tokens * 0.002)() == 48
    assert PrefillChunkSize(lambda tokens: tokens * 0.05)() == MIN_CHUNK_TOKENS
    assert PrefillChunkSize(lambda tokens: tokens * 1e-6)() == PRIOR_TOKENS


def test_a_pass_may_take_as_long_as_four_of_one_token() -> None:
    found = {}
    for token_s in (0.05, 0.15):
        chunk_size = PrefillChunkSize(lambda tokens, token_s=token_s: token_s if tokens == 1 else 1.0)
        for size, seconds in ((16, 0.19), (32, 0.25), (64, 0.45), (128, 0.8)):
            chunk_size.observe(size, seconds)
        found[token_s] = chunk_size()
    # 128 tokens would be cheaper, but take too long in any case.
    assert found == {0.05: 16, 0.15: 64}


def test_a_pass_that_waits_for_another_one_says_nothing_of_a_size() -> None:
    chunk_size = PrefillChunkSize()
    chunk_size.leaves_out_next = True
    chunk_size.observe(16, 10.0)
    chunk_size.observe(16, 16e-5)
    assert chunk_size() > 16


@pytest.mark.parametrize("length", [17, 42, 60, 100])
def test_sizes_grow_also_where_prompts_that_are_read_together_do_not_come_to_them(length: int) -> None:
    chunk_size = PrefillChunkSize()
    for _ in range(8):
        most = chunk_size.most_tokens
        assert chunk_size() <= most
        num_tokens = max(1, most // length) * length
        chunk_size.observe(num_tokens, 0.0002 * num_tokens)
    assert chunk_size() == 768
    assert 768 <= chunk_size.most_tokens <= MAX_PASS_S / 0.0002 * 1.01


def test_no_pass_is_made_for_a_small_rest() -> None:
    chunk_size = PrefillChunkSize()
    for num_tokens in (16, 16, 24):  # 24 do not fit into the time
        chunk_size.observe(num_tokens, num_tokens * 0.009)
    assert [chunk_size.of(num_tokens) for num_tokens in (5, 16, 22, 23, 100)] == [5, 16, 22, 16, 16]
    # 22 would take too long.
    chunk_size.observe(16, 16 * 0.02)
    assert chunk_size.of(22) == 16


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    chunk_size = PrefillChunkSize()
    for number in range(60):
        n = chunk_size()
        chunk_size.observe(n, 0.05 if number == 1 else 0.01 + n * 1e-5)
    assert chunk_size() == MAX_CHUNK_TOKENS


def test_a_device_that_gets_slower_has_shorter_passes() -> None:
    chunk_size = PrefillChunkSize()
    for _ in range(10):
        n = chunk_size()
        chunk_size.observe(n, n * 1e-4)
    before = chunk_size()
    for _ in range(40):
        n = chunk_size()
        chunk_size.observe(n, n * 2e-3)
    assert chunk_size() < before
    assert chunk_size() * 2e-3 <= MAX_PASS_S


def test_the_short_end_of_a_prompt_says_nothing_of_a_size() -> None:
    chunk_size = PrefillChunkSize()
    for n in (1, 5, 10, 4096):
        chunk_size.observe(n, 100.0)
    assert chunk_size() == MIN_CHUNK_TOKENS


# --- at work --------------------------------------------------------------------------------------


async def test_a_prompt_is_read_in_passes_that_fit_into_the_time(autojump_clock: Any) -> None:
    def price(job: Job[Any]) -> float:
        return 0.001 * job.num_tokens if job.kind == "prefill" else priced()(job)

    prompt = [i % 60 for i in range(1016)]
    async with simulated(ScriptedModel(truthful), price=price) as simulation:
        assert await text_of(simulation, prompt, max_tokens=4) == continuation(prompt, 4)
        passes = simulation.spans("target", "prefill")
    # The last one takes in the rest.
    assert max(span.num_tokens for span in passes[:-1]) == 192 < passes[-1].num_tokens
    assert max(span.ended - span.began for span in passes) <= MAX_PASS_S
    assert sum(span.num_read for span in passes) == 1015


@pytest.mark.parametrize("kv_bits", [None, 8])
async def test_where_the_text_depends_on_it_passes_are_mlx_lms(kv_bits: int | None) -> None:
    target, spans = build("qwen3", head_dim=32), list[Any]()
    prompt = [token % 60 for token in prompt_of(200)]
    async with runtime.open(
        (target, None), kv_bits=kv_bits, kv_group_size=32, quantized_kv_start=50, trace=spans.append
    ) as rt:
        completion = await rt.generate(prompt, max_tokens=8)
    prefill = [span for span in spans if isinstance(span, Span) and span.kind == "prefill"]
    passes = [span.num_read for span in prefill]
    assert sum(passes) == 199
    assert passes == [199] or kv_bits is None
    assert FIXED_CHUNK_TOKENS == 2048
    if kv_bits is None:
        assert [token.id for token in completion.tokens] == greedy(target, prompt, 8)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12),
    st.sampled_from([16, 64, 512, 2048]),
    st.sampled_from([80, 2048]),
)
def test_prompts_that_are_read_in_one_pass_fit_and_are_of_like_length(
    lengths: list[int], size: int, width: int
) -> None:
    chosen = read_together(lengths, size, width)
    assert 0 in chosen
    assert chosen == sorted(set(chosen))
    if len(chosen) > 1:
        longest = max(lengths[index] for index in chosen)
        assert longest <= width
        assert longest * len(chosen) <= size
        assert sum(lengths[index] for index in chosen) >= (1.0 - MAX_PADDING) * longest * len(chosen)


def test_as_many_prompts_of_like_length_are_read_in_one_pass_as_fit() -> None:
    assert read_together([60] * 16, 512, 2048) == list(range(8))
    assert read_together([60] * 16, 32, 2048) == [0]
    assert read_together([60, 8, 64, 400, 55], 512, 2048) == [0, 2, 4]
