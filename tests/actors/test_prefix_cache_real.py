"""The prefix cache on real models: a text that reuses cached tokens equals the text without a cache."""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import ARCHITECTURES, OF_ALL_CACHES, build
from completions import ids
from greedy_pair import greedy_text
from models import gemma3_text, greedy, llama, mamba, near, prompt_of, sliding_llama
from prefills import Prefills
from sweeps import sweep

import runtime
from actors.mlx.cache_options import CacheOptions
from actors.mlx.model import MLXModel
from actors.prefix_cache import common_length, pack

# Several chunks per prompt. The window is full in the first turn or the second. The tail is cut off for a checkpoint.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gemma3_text": gemma3_text,
    "sliding_llama": functools.partial(sliding_llama, window=64),
    "mamba": mamba,
    "lfm2": functools.partial(build, "lfm2"),
    "qwen3_next": functools.partial(build, "qwen3_next"),
    "recurrent_gemma": functools.partial(build, "recurrent_gemma"),
    "llama4": functools.partial(build, "llama4"),
    "falcon_h1": functools.partial(build, "falcon_h1"),
}
SETTINGS = {"prefill_step_size": 16}
# One of each kind of cache; the other families run in the slow tests.
FEW = ("llama", "gemma3_text", "mamba", "qwen3_next")


@functools.cache
def family(name: str) -> nn.Module:
    return FAMILIES[name]()


@functools.cache
def drafter(name: str) -> nn.Module:
    return near(family(name), noise=0.05)


@functools.cache
def text(name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return greedy(family(name), prompt, num_tokens)


def some_prompt(length: int, *, seed: int = 0) -> list[int]:
    return prompt_of(length, seed=seed, vocab_size=64)  # the smallest vocabulary among the families


# --- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lookahead"),
    [
        ("llama", "auto"),
        *((name, 3) for name in FEW),
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in FAMILIES if name not in FEW),
        pytest.param("mamba", 0, marks=pytest.mark.slow),
    ],
)
async def test_turns_in_a_row_have_the_greedy_text_and_read_only_what_is_new(name: str, lookahead: Any) -> None:
    prefills = Prefills()
    async with runtime.open((family(name), None), (drafter(name), None), trace=prefills) as rt:
        prompt, known = some_prompt(41), 0
        for turn in range(3):
            completion = await rt.generate(prompt, max_tokens=12, lookahead=lookahead, reuse_prefix=True, **SETTINGS)
            assert ids(completion) == text(name, tuple(prompt), 12)
            statistics = completion.statistics
            assert prefills.num_read("target") == len(prompt) - 1 - statistics.cached_tokens
            # At least the prompt of the last turn. If no token was drafted beyond the text, or tokens can be dropped,
            # its answer as well, except the last tokens.
            assert statistics.cached_tokens >= known - 1
            known = len(prompt)
            prompt = prompt + ids(completion) + some_prompt(7, seed=turn + 1)


async def three_turns(rt: runtime.Runtime, **asked: Any) -> list[int]:
    """Assert that texts of a conversation are those without a cache. Returns: how many tokens of each were cached."""
    prompt, cached = some_prompt(41), []
    for turn in range(3):
        cold = await rt.generate(prompt, **asked)
        warm = await rt.generate(prompt, reuse_prefix=True, **asked)
        assert ids(warm) == ids(cold)
        cached.append(warm.statistics.cached_tokens)
        prompt = prompt + ids(warm) + some_prompt(7, seed=turn + 1)
    return cached


# --- options --------------------------------------------------------------------------------------


@pytest.mark.slow
@sweep(("name", "rewind"), [("gemma3_text", "checkpoint"), ("gemma3_text", "none"), ("qwen3_next", "none")])
async def test_every_way_to_rewind(name: str, rewind: str) -> None:
    async with runtime.open((family(name), None), (drafter(name), None), rewind=rewind) as rt:
        await three_turns(rt, max_tokens=12, lookahead=3, **SETTINGS)


@pytest.mark.slow
@sweep(
    "start, step, reused",
    [
        (0, 16, (True, True)),
        (30, 2048, (False, False)),  # each prompt is read in one pass, at whose end its caches are quantised
        (60, 16, (True, False)),  # the second text is quantised as it is generated, the third as it is read
        (75, 2048, (True, True)),
        (10_000, 16, (True, True)),
    ],
)
async def test_a_quantised_cache_is_never_taken_for_one_that_was_quantised_elsewhere(start, step, reused):
    model = build("qwen3", head_dim=32)
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    async with runtime.open((model, None), (near(model, noise=0.05), None), **options) as rt:
        cached = await three_turns(rt, max_tokens=12, lookahead=3, prefill_step_size=step)
    assert cached[0] == 0
    # The first turn caches 52 tokens, the second 71.
    assert (cached[1] > 0, cached[2] > 0) == reused


async def test_statistics_say_where_a_quantised_cache_was_read_in_other_passes() -> None:
    options = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 40}
    async with runtime.open((build("qwen3", head_dim=32), None), **options) as rt:
        found = []
        # Quantised after 48 tokens in passes of 16, and after 64 in passes of 64.
        for num_common, step in ((100, 16), (70, 64), (45, 64), (80, 16)):
            prompt = [*some_prompt(100)[:num_common], *some_prompt(100, seed=num_common + 1)]
            asked = {"max_tokens": 4, "reuse_prefix": True, "prefill_step_size": step}
            statistics = (await rt.generate(prompt, **asked)).statistics
            found.append((statistics.cached_tokens, statistics.parted_tokens, statistics.mismatched_tokens))
        assert found == [(0, 0, 0), (0, 0, 70), (0, 45, 0), (80, 0, 0)]


@sweep("size", [20, 64, 200])
async def test_a_bounded_cache_that_keeps_its_first_is_reused_only_where_nothing_was_forgotten(size: int) -> None:
    model = build("qwen3")
    async with runtime.open((model, None), max_kv_size=size) as rt:
        cached = await three_turns(rt, max_tokens=12, **SETTINGS)
    # Prompts of 41, 60 and 79 tokens.
    assert (cached[1] > 0, cached[2] > 0) == (size >= 59, size >= 78)


@sweep("name", ["mamba", "lfm2", "falcon_h1", "qwen3_next"])
def test_a_text_with_checkpoints_holds_no_more_than_what_is_counted_of_it(name: str) -> None:
    """And not, beside each state, all of the pass that it is a part of."""
    model = MLXModel(family(name), CacheOptions())
    sequence = model.open_sequence(alongside_model=False)
    sequence.feed((1, 2, 3), 0)  # prepares what stays
    sequence.close()
    before = mx.get_active_memory()
    sequence = model.open_sequence(alongside_model=False)
    for seed in range(3):
        sequence.feed(tuple(some_prompt(500, seed=seed)), 0)
        sequence.add_prefix_checkpoint()
    assert mx.get_active_memory() - before < 1.2 * sequence.num_bytes


SHARING: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "full attention": (llama, {}),
    "quantised": (lambda: build("qwen3", head_dim=32), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 20}),
    "hybrid": (lambda: build("lfm2"), {}),
    "sliding windows": (gemma3_text, {}),
}


@sweep("name", SHARING)
async def test_a_beginning_that_texts_have_in_common_is_in_memory_once(name: str) -> None:
    make, options = SHARING[name]
    system = some_prompt(300)
    prompts = [[*system, *some_prompt(9, seed=seed)] for seed in range(4)]
    asked = {"max_tokens": 6, "ignore_eos": True, "prefill_step_size": 64}
    async with runtime.open((make(), None), **options) as rt:
        prefix_cache, sizes = rt._target.prefix_cache, []
        for prompt in prompts:
            cold = ids(await rt.generate(prompt, **asked))
            assert ids(await rt.generate(prompt, reuse_prefix=True, **asked)) == cold
            await rt._target.settled_prefix_cache()
            sizes.append(prefix_cache.num_bytes)
        # A window is of one text alone, as are recurrent states.
        assert len(prefix_cache) >= 4
        assert sizes[-1] < (4.0 if name == "sliding windows" else 1.5) * sizes[0]
        # Each goes on as if it were alone: in a next turn, from another point, and when the first one has left.
        longer = [[*prompts[2], 5, 6], [*prompts[1][:280], 7], [*prompts[3], 8], [*prompts[3][:290], 9, 9]]
        alone = [ids(await rt.generate(prompt, **asked)) for prompt in longer]
        for evicts in (False, True):
            if evicts:
                await rt._target.settled_prefix_cache()
                prefix_cache.shrink(sizes[-1] - 1)
                assert len(prefix_cache) >= 3
            for prompt, cold in zip(longer, alone, strict=True):
                assert ids(await rt.generate(prompt, reuse_prefix=True, **asked)) == cold


@sweep("name", SHARING)
def test_what_is_stored_in_parts_is_what_was_read(name: str) -> None:
    """Of texts that part anywhere, also within parts that others have in common, and at their ends."""
    make, options = SHARING[name]
    model, draws = MLXModel(make(), CacheOptions(**options)), random.Random(5)

    def read(text: list[int]) -> Any:
        sequence = model.open_sequence(alongside_model=False)
        for begin in range(0, len(text), 32):
            sequence.feed(tuple(text[begin : begin + 32]), 0)
        return sequence

    stored = [(some_prompt(120), read(some_prompt(120)))]
    for _ in range(8):
        base, other = draws.choice(stored)
        num_common, num_more = draws.choice([40, 64, 90, 91, 200]), draws.randrange(30)
        text = [*base[:num_common], *some_prompt(num_more, seed=draws.randrange(99))]
        sequence = read(text)
        sequence.share(other, common_length(pack(text), pack(base)))
        stored.append((text, sequence))
    in_common = {id: size for _, sequence in stored for id, size in sequence.memory.items()}
    assert sum(in_common.values()) < sum(sequence.num_bytes for _, sequence in stored)
    # Each goes on as if it were alone, also after what was fed to the others.
    left = [(text, sequence, read(text).feed((7, 8), 1)) for text, sequence in stored]
    mx.eval([expected for *_, expected in left])
    while left:
        for text, sequence, expected in left:
            assert mx.allclose(sequence.copy(len(text)).feed((7, 8), 1), expected, atol=1e-3)
            saved = model.open_sequence(alongside_model=False)
            saved.put_state(sequence.take_state(tuple(text)))
            assert mx.allclose(saved.feed((7, 8), 1), expected, atol=1e-3)
        text, sequence, _ = left.pop(draws.randrange(len(left)))
        expected = read(text).feed((9, 10), 1)
        sequence.reuse(len(text))
        assert mx.allclose(sequence.feed((9, 10), 1), expected, atol=1e-3)


# --- every architecture ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL_CACHES)
async def test_every_architecture_goes_on_from_what_is_cached(name: str) -> None:
    model, is_stepwise = build(name), ARCHITECTURES[name].is_stepwise
    whole: Sequence[int] = greedy_text(model)
    async with runtime.open((model, None)) as rt:
        cached = []
        # Forward, back, forward, and forward.
        for length, num_tokens in ((20, 12), (40, 12), (33, 5), (44, 3), (47, 6)):
            prompt, asked = whole[:length], {"max_tokens": num_tokens, "prefill_step_size": 16}
            completion = await rt.generate(prompt, reuse_prefix=True, **asked)
            # A stepwise model gives another text after the prompt than after its own tokens, with or without a cache.
            cold = ids(await rt.generate(prompt, **asked)) if is_stepwise else whole[length : length + num_tokens]
            assert ids(completion) == cold, f"after {length} tokens"
            cached.append(completion.statistics.cached_tokens)
    assert cached[1] == (0 if is_stepwise else 31)
