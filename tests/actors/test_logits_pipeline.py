"""Processors and filters act on a text as in mlx-lm's plain decoding, for every drafter and lookahead."""

import gc
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import scipy
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from models import CLEAR_LEAD, VOCAB_SIZE, Padded, llama, mamba, near, prompt_of, qwen3, sliding_llama
from scripted import ids
from sweeps import sweep

import runtime
from actors.sampling.logits_pipeline import NO_HISTORY, LogitsPipeline
from actors.sampling.user_code import MAX_STATES
from protocol.messages import Open
from protocol.settings import Settings

NUM_TOKENS = 24
PROMPT = prompt_of(11)
LOOKAHEADS: list[Any] = [0, 1, 3, "auto"]

TARGET = llama()
NEAR = near(TARGET, noise=0.05)


def plain(model: nn.Module, num_tokens: int = NUM_TOKENS, own: Sequence[Any] = (), **penalties: Any) -> list[int]:
    """mlx-lm's greedy text, up to the first token that depends on rounding."""
    return [token for token, _ in plain_steps(model, num_tokens, own, **penalties)]


def plain_steps(
    model: nn.Module, num_tokens: int = NUM_TOKENS, own: Sequence[Any] = (), **penalties: Any
) -> list[tuple[int, mx.array]]:
    steps = []
    processors = [*make_logits_processors(**penalties), *own] or None
    for token, logprobs in generate_step(mx.array(PROMPT), model, max_tokens=num_tokens, logits_processors=processors):
        second, first = mx.topk(logprobs, 2).tolist()
        if abs(first - second) < CLEAR_LEAD:
            break
        steps.append((token, logprobs))
    return steps


# --- penalties and biases -------------------------------------------------------------------------

PENALTIES = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-8, 8), max_size=4),
        "repetition_penalty": st.floats(0.5, 3),
        "repetition_context_size": st.integers(1, 40),
        "presence_penalty": st.floats(-2, 4),
        "presence_context_size": st.integers(1, 40),
        "frequency_penalty": st.floats(-2, 4),
        "frequency_context_size": st.integers(1, 40),
    },
)


@pytest.mark.slow
@given(choices=st.lists(PENALTIES, min_size=8, max_size=8))
@settings(max_examples=4)
def test_greedy_text_is_that_of_plain_decoding_under_any_penalties(choices: list[dict[str, Any]]) -> None:
    async def main() -> None:
        async with runtime.open((TARGET, None), (NEAR, None)) as rt:
            for number, penalties in enumerate(choices):
                reference = plain(TARGET, **penalties)
                lookahead = LOOKAHEADS[number % len(LOOKAHEADS)]
                completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead, **penalties)
                assert ids(completion.tokens)[: len(reference)] == reference

    trio.run(main)


@sweep("build", [llama, *(pytest.param(build, marks=pytest.mark.slow) for build in (qwen3, sliding_llama, mamba))])
async def test_penalties_reach_back_into_the_prompt_on_every_kind_of_cache(build: Any) -> None:
    model, penalties = build(), {"repetition_penalty": 1.7, "repetition_context_size": 30, "frequency_penalty": 0.6}
    reference = plain(model, **penalties)
    assert reference != plain(model)
    async with runtime.open((model, None), (near(model, noise=0.05), None)) as rt:
        for lookahead in LOOKAHEADS:
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead, **penalties)
            assert ids(completion.tokens)[: len(reference)] == reference, lookahead


async def test_penalties_may_look_back_to_the_beginning() -> None:
    def penalties(size: int | None) -> dict[str, Any]:
        strengths = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
        return strengths | {f"{name.removesuffix('_penalty')}_context_size": size for name in strengths}

    reference = plain(TARGET, **penalties(10**6))
    assert reference[:NUM_TOKENS] != plain(TARGET, **penalties(20))[: len(reference)]
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        for lookahead in LOOKAHEADS:
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead, **penalties(None))
            assert ids(completion.tokens)[: len(reference)] == reference, lookahead


async def test_a_drafter_with_the_penalties_is_right_and_without_them_harmless() -> None:
    penalties = {"repetition_penalty": 2.5, "presence_penalty": 1.5, "logit_bias": {VOCAB_SIZE - 1: 2.0}}
    reference = plain(TARGET, **penalties)
    for draft in (TARGET, Padded(TARGET, 16)):
        async with runtime.open((TARGET, None), (draft, None)) as rt:
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3, **penalties)
        assert ids(completion.tokens)[: len(reference)] == reference
        assert completion.statistics.rejected == 0
    narrow = llama(vocab_size=VOCAB_SIZE - 20)
    async with runtime.open((TARGET, None), (narrow, None)) as rt:
        completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3, **penalties)
    assert ids(completion.tokens)[: len(reference)] == reference
    assert completion.statistics.draft_failures == 0


# --- filters --------------------------------------------------------------------------------------


def opened(**keywords: Any) -> Open:
    return Open(0, tuple(PROMPT), Settings(**keywords), seed=keywords.get("seed", 0) or 0, stop_tokens=frozenset())


FILTERS = st.fixed_dictionaries(
    {"temperature": st.floats(0.3, 1.5)},
    optional={
        "top_p": st.floats(0.05, 1),
        "min_p": st.floats(0, 0.5),
        "min_tokens_to_keep": st.integers(1, 5),
        "top_k": st.integers(0, 20),
        "xtc_threshold": st.floats(0, 0.5),
        "xtc_special_tokens": st.lists(st.integers(0, 19), max_size=3),
    },
)


@pytest.mark.slow
@given(filters=FILTERS, is_xtc_on=st.booleans(), seed=st.integers(0, 1000))
@settings(max_examples=25)
def test_what_is_left_to_sample_from_is_what_mlx_lms_sampler_samples_from(filters, is_xtc_on, seed):
    logits, num_draws = 2 * mx.random.normal((1, 20), key=mx.random.key(seed)), 2000
    # With a probability between 0 and 1, mlx-lm draws one number for all rows of a batch.
    filters["xtc_probability"] = float(is_xtc_on)
    if filters.get("top_k", 0) >= 20:
        del filters["top_k"]
    shaped = LogitsPipeline(opened(**filters)).shape(logits, NO_HISTORY, start=5)
    ours = mx.softmax(shaped / filters["temperature"], axis=-1)[0].tolist()
    sampler = make_sampler(**{"temp" if name == "temperature" else name: value for name, value in filters.items()})
    mx.random.seed(seed)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.disable_compile()  # a compiler would run for the constants of each example
    try:
        theirs = Counter(sampler(mx.repeat(logprobs, num_draws, axis=0)).tolist())
    finally:
        mx.enable_compile()
    assert all(ours[token] > 0 for token in theirs)
    cells = [(theirs[token], num_draws * p) for token, p in enumerate(ours) if num_draws * p >= 5]
    assert sum(expected for _, expected in cells) > 0.95 * num_draws
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    assert scipy.special.chdtrc(max(1, len(cells) - 1), statistic) > 1e-5


def test_xtc_tosses_a_coin_for_each_position_the_same_for_both_models() -> None:
    logits = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]] * 400))
    logits_pipeline = LogitsPipeline(opened(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1))
    other = LogitsPipeline(opened(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.1))
    left_out = mx.isinf(logits_pipeline.filter(logits, 10))[:, 0].tolist()
    assert 90 < sum(left_out) < 150
    one_by_one = [bool(mx.isinf(other.filter(logits[:1], 10 + i))[0, 0].item()) for i in range(40)]
    assert one_by_one == left_out[:40]
    differently_seeded = LogitsPipeline(opened(temperature=1.0, xtc_probability=0.3, seed=1))
    assert mx.isinf(differently_seeded.filter(logits, 10))[:, 0].tolist() != left_out


async def test_where_one_token_is_left_it_comes_at_any_temperature_by_either_rule() -> None:
    """And at temperature 0, filters do nothing."""
    greedy: dict[str, Any] = {"top_k": 2, "top_p": 0.3, "xtc_probability": 1.0}
    sampled: dict[str, Any] = {"temperature": 1.5, "top_k": 1, "seed": 3}
    reference = plain(TARGET)
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        for settings in (greedy, *({**sampled, "acceptance": rule} for rule in ("match", "rejection"))):
            for lookahead in LOOKAHEADS if settings is greedy else (1, "auto"):
                completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=lookahead, **settings)
                assert ids(completion.tokens) == reference, (settings, lookahead)


# --- the coupled match rule -----------------------------------------------------------------------

SHAPES: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"min_p": 0.02, "repetition_penalty": 1.2},
    {"top_k": 20, "frequency_penalty": 0.5},
    {"xtc_probability": 0.5, "top_p": 0.95},
]
TEMPERATURES = (0.3, 0.6, 1.0, 1.5)
PAIRS = {
    "near": (TARGET, NEAR),
    "a stranger": (TARGET, llama(seed=77, hidden_size=16, num_hidden_layers=1)),
    "recurrent": (mamba(), near(mamba(), noise=0.05)),
}


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
async def test_a_seeds_text_depends_only_on_target_prompt_and_settings(pair: str) -> None:
    target, draft = PAIRS[pair]
    num_seeds, lookaheads = 20, (1, 2, 4, "auto")  # every temperature with every shape
    chosen = [
        {"seed": seed, "temperature": TEMPERATURES[seed % len(TEMPERATURES)], **SHAPES[seed % len(SHAPES)]}
        for seed in range(num_seeds)
    ]
    async with runtime.open((target, None)) as rt:
        alone = [ids((await rt.generate(PROMPT, max_tokens=12, **own)).tokens) for own in chosen]
    async with runtime.open((target, None), (draft, None)) as rt:
        asked = [(PROMPT, {**own, "lookahead": lookaheads[seed % 7 % 4]}) for seed, own in enumerate(chosen)]
        together = await rt.generate_many(asked, max_concurrent=3, max_tokens=12)
        assert rt.statistics().accepted > 0
    assert [ids(each.tokens) for each in together] == alone
    assert len({tuple(text) for text in alone}) > 0.7 * num_seeds


# --- user-defined processors ----------------------------------------------------------------------


class Bans:
    """Bans the tokens that it has seen generated. It keeps them as a state, and asserts the promised order of calls."""

    def __init__(self) -> None:
        self.seen: tuple[int, ...] = ()
        self.calls: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        text = tuple(tokens.tolist())
        assert logits.shape == (1, VOCAB_SIZE)
        assert text[: len(PROMPT)] == tuple(PROMPT)
        assert self.seen == text[len(PROMPT) : -1]
        self.calls.append(len(text))
        self.threads.add(threading.get_ident())
        self.seen = text[len(PROMPT) :]
        bans = mx.array([-mx.inf if token in self.seen else 0.0 for token in range(VOCAB_SIZE)])
        return logits + bans

    def save(self) -> tuple[int, ...]:
        return self.seen

    def restore(self, state: tuple[int, ...]) -> None:
        self.seen = state


def banned(tokens: mx.array, logits: mx.array) -> mx.array:
    """The same without a state."""
    seen = tokens[len(PROMPT) :].tolist()
    return logits + mx.array([-mx.inf if token in seen else 0.0 for token in range(VOCAB_SIZE)])


@sweep("build", [llama, *(pytest.param(build, marks=pytest.mark.slow) for build in (sliding_llama, mamba))])
async def test_a_processor_that_keeps_a_state_is_taken_back_with_the_text(build: Any) -> None:
    model = build()
    reference = plain(model, own=[banned])
    assert reference != plain(model)
    async with runtime.open((model, None), (near(model, noise=0.05), None)) as rt:
        for lookahead in LOOKAHEADS:
            processor = Bans()
            asked: dict[str, Any] = {"lookahead": lookahead, "logits_processors": [processor]}
            completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, **asked)
            assert ids(completion.tokens)[: len(reference)] == reference, lookahead
            assert completion.statistics.draft_failures == 0
            if lookahead == 3:
                assert completion.statistics.accepted > 0
                assert len(processor.threads) == 2


async def test_streams_at_once_may_share_a_processor() -> None:
    reference, processor = plain(TARGET, own=[banned]), Bans()
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        first = rt.stream(PROMPT, max_tokens=NUM_TOKENS, lookahead=2, logits_processors=[processor])
        for _ in range(5):
            await anext(first)
        others = await rt.generate_many([PROMPT] * 3, max_tokens=NUM_TOKENS, logits_processors=[processor])
        await first.aclose()
    assert [ids(other.tokens) for other in others] == [reference] * 3


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [0, 3])
async def test_each_stream_begins_with_the_state_in_which_the_processors_owner_left_it(lookahead: int) -> None:
    class Turns:
        """Allows every fifth token, each time with another remainder."""

        num_calls = 0

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            allowed = mx.arange(logits.shape[-1]) % 5 == self.num_calls % 5
            self.num_calls += 1
            return mx.where(allowed, logits, -mx.inf)

        def save(self) -> int:
            return self.num_calls

        def restore(self, state: int) -> None:
            self.num_calls = state

    processor = Turns()
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        for first in (0, 0, 2, 2, 3):
            processor.num_calls = first
            for _ in range(2):
                completion = await rt.generate(PROMPT, max_tokens=7, lookahead=lookahead, logits_processors=[processor])
                assert [token.id % 5 for token in completion.tokens] == [(first + i) % 5 for i in range(7)]
                del completion
                gc.collect()
            assert processor.num_calls == first


def test_a_state_that_is_no_longer_at_hand_is_found_again() -> None:
    processor = Bans()
    logits_pipeline = LogitsPipeline(opened(logits_processors=[processor]))
    logits = mx.zeros((1, VOCAB_SIZE))

    def left_out(generated: Sequence[int]) -> set[int]:
        text = [*PROMPT, *generated]
        row = logits_pipeline.process(logits, logits_pipeline.history(text), len(text))[0].tolist()
        return {token for token, logit in enumerate(row) if logit == float("-inf")}

    long = [(7 * i) % 50 for i in range(MAX_STATES + 20)]
    for length in range(len(long)):
        assert left_out(long[:length]) == set(long[:length])
    calls = len(processor.calls)
    assert left_out([1, 2, 3]) == {1, 2, 3}
    assert processor.calls[calls:] == [len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2, len(PROMPT) + 3]
    assert left_out(long[:-1]) == set(long[:-1])
    assert left_out([1, 2, 4]) == {1, 2, 4}


async def test_any_other_processor_is_called_on_committed_text_alone_and_that_is_said_once(caplog):
    class Ledger:
        """Records the lengths of its calls, and has no `restore`."""

        def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
            lengths.append(len(tokens))
            return banned(tokens, logits)

    with caplog.at_level(logging.WARNING, "outrider"):
        async with runtime.open((TARGET, None), (NEAR, None)) as rt:
            for ledger in (Ledger(), Ledger()):
                lengths: list[int] = []
                completion = await rt.generate(PROMPT, max_tokens=NUM_TOKENS, lookahead=3, logits_processors=[ledger])
                assert ids(completion.tokens) == plain(TARGET, own=[banned])
                assert completion.statistics.proposed == 0
                assert lengths == list(range(len(PROMPT), len(PROMPT) + NUM_TOKENS))
    (warning,) = [record.getMessage() for record in caplog.records if "Ledger" in record.getMessage()]
    assert "nothing is drafted" in warning
    assert "runtime.stateless" in warning


# --- log-probabilities ----------------------------------------------------------------------------


@sweep("build", [llama, *(pytest.param(build, marks=pytest.mark.slow) for build in (sliding_llama, mamba))])
async def test_log_probabilities_are_those_of_plain_decoding(build: Any) -> None:
    model, penalties = build(), {"presence_penalty": 1.2}
    reference = [(id, logprobs.tolist()) for id, logprobs in plain_steps(model, **penalties)]
    for rewind, lookaheads in (("auto", (0, 3)), ("none", (1, "auto"))):
        async with runtime.open((model, None), (near(model, noise=0.05), None), rewind=rewind) as rt:
            asked: dict[str, Any] = {"max_tokens": NUM_TOKENS, "logprobs": 3, **penalties}
            completions = [await rt.generate(PROMPT, lookahead=lookahead, **asked) for lookahead in lookaheads]
        for completion in completions:
            for token, (id, logprobs) in zip(completion.tokens, reference, strict=False):
                assert token.id == token.top_logprobs[0].id == id
                assert token.logprob == pytest.approx(logprobs[id], abs=1e-4)
                found = [top.logprob for top in token.top_logprobs]
                assert found == pytest.approx(sorted(logprobs, reverse=True)[:3], abs=1e-4)
                assert found == pytest.approx([logprobs[top.id] for top in token.top_logprobs], abs=1e-4)


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
async def test_log_probabilities_are_from_before_filters_and_temperature(acceptance: Any) -> None:
    sampled: dict[str, Any] = {"temperature": 1.3, "top_k": 3, "seed": 1, "acceptance": acceptance}
    async with runtime.open((TARGET, None), (NEAR, None)) as rt:
        completion = await rt.generate(PROMPT, max_tokens=10, lookahead=3, logprobs=VOCAB_SIZE, **sampled)
    text = [*PROMPT, *ids(completion.tokens)]
    rows = TARGET(mx.array([text]))[0]
    logprobs = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    for token in completion.tokens:
        assert token.logprob == pytest.approx(logprobs[len(PROMPT) - 1 + token.index, token.id].item(), abs=1e-4)
        assert len(token.top_logprobs) == VOCAB_SIZE
        assert token.id in [top.id for top in token.top_logprobs[:3]]
        assert sum(mx.exp(mx.array([top.logprob for top in token.top_logprobs])).tolist()) == pytest.approx(1, abs=1e-4)


# --- bounds that depend on the model --------------------------------------------------------------


async def test_what_the_vocabulary_does_not_have_is_refused() -> None:
    async with runtime.open((TARGET, None)) as rt:
        for name, value in {
            "logit_bias": {VOCAB_SIZE: 1.0},
            "xtc_special_tokens": [3, VOCAB_SIZE],
            "stop_tokens": [VOCAB_SIZE],
            "top_k": VOCAB_SIZE + 1,
            "min_tokens_to_keep": VOCAB_SIZE + 1,
        }.items():
            with pytest.raises(runtime.SettingsError, match=f"^{name} .* vocabulary of {VOCAB_SIZE} ids"):
                rt.stream(PROMPT, **{name: value})
        assert rt.num_streams == 0
        assert (await rt.generate(PROMPT, max_tokens=2, temperature=1.0, top_k=VOCAB_SIZE)).finish_reason == "length"


async def test_numbers_that_python_has_and_mlx_has_not_harm_no_model() -> None:
    large = 2**70
    async with runtime.open((llama(), None)) as rt:
        for name in ("repetition", "presence", "frequency"):
            near_bound = {f"{name}_penalty": 0.5, f"{name}_context_size": 2**31}
            told = {f"{name}_penalty": 0.5, f"{name}_context_size": 1000}
            answer, expected = [await rt.generate(prompt_of(9), max_tokens=4, **some) for some in (near_bound, told)]
            assert answer.tokens == expected.tokens
            assert len((await rt.generate(prompt_of(9), max_tokens=4, **{f"{name}_penalty": large})).tokens) == 4
        assert len((await rt.generate(prompt_of(9), max_tokens=4, temperature=large, seed=1)).tokens) == 4
        biased = await rt.generate(prompt_of(9), max_tokens=4, logit_bias={5: large})
        assert set(ids(biased.tokens)) == {5}


async def test_the_smallest_nucleus_is_the_likeliest_token() -> None:
    async with runtime.open((llama(), None)) as rt:
        greedy = await rt.generate(prompt_of(9), max_tokens=8, logprobs=1)
        for top_p in (1e-30, 1e-46, 1e-300):
            drawn = await rt.generate(prompt_of(9), max_tokens=8, temperature=1.0, seed=3, top_p=top_p, logprobs=1)
            assert ids(drawn.tokens) == ids(greedy.tokens), top_p
