"""Logits with NaN or infinity: a target's end that stream with an error, a drafter's cost only speed."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import trio
from models import greedy, llama, near, prompt_of
from scripted import (
    VOCAB_SIZE,
    Script,
    ScriptedModel,
    agreeing,
    always,
    collect,
    continuation,
    ids,
    never,
    next_token,
    read_into,
    simulated,
    text_of,
    within,
)
from sweeps import sweep

import runtime
from actors.sampling.logits_pipeline import LogitCheck
from protocol.errors import NotANumberError, ProcessorError

PROMPT = [5, 6, 7, 8, 9]
TEXT = continuation(PROMPT, 12)
OTHER = [1, 2]


def sure(history: Sequence[int]) -> Sequence[float]:
    """The true token has all of the probability at every temperature used here."""
    return [1000.0 if token == next_token(history) else 0.0 for token in range(VOCAB_SIZE)]


SPOILT: dict[str, Callable[[Sequence[float]], Sequence[float]]] = {
    "all NaN": lambda row: [math.nan] * len(row),
    "one NaN": lambda row: [*row[:-2], math.nan, row[-1]],
    "+inf": lambda row: [*row[:3], math.inf, *row[4:]],
    "all -inf": lambda row: [-math.inf] * len(row),
}
KINDS = tuple(SPOILT)


def failing_at(position: int, how: str, script: Script = sure) -> Script:
    """A script with spoilt logits at one position after the prompt, on the true text only."""

    def logits(history: Sequence[int]) -> Sequence[float]:
        is_there = len(history) == position and list(history[: len(PROMPT)]) == PROMPT
        return SPOILT[how](script(history)) if is_there else script(history)

    return logits


def shifted(tokens: mx.array, logits: mx.array) -> mx.array:
    """Changes nothing visible, but needs the tokens."""
    return logits + 1.0


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "match": {"temperature": 0.7, "seed": 3},
    "rejection": {"temperature": 0.7},
    "filters": {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "top_k": 5, "acceptance": "rejection"},
    "logprobs": {"logprobs": 2},
    "penalties": {"presence_penalty": 0.1},
    "processors": {"logits_processors": [runtime.stateless(shifted)]},
    "bias": {"logit_bias": {1: -0.5}},
}
LOOKAHEADS = [0, 3, "auto"]
UNDOS: dict[str, dict[str, Any]] = {
    "trim": {"undo": always},
    "checkpoints": {"undo": never, "keeps_states": True},
    "N=1": {"undo": never},
    "until full": {"undo": within(10)},
}


@sweep(
    "mode, lookahead, position, draft, undo",
    [
        *(
            (mode, lookahead, (5, 7, 12)[(i + j) % 3], "a draft model", "trim")
            for i, mode in enumerate(MODES)
            for j, lookahead in enumerate(LOOKAHEADS)
        ),
        *(
            (("greedy", "rejection")[position % 2], 3, position, "a draft model", undo)
            for undo in UNDOS
            for position in (5, 6, 8, 11, 14)
        ),
        *((mode, "auto", (6, 7, 11)[i % 3], ("ngram", None)[i % 2], "trim") for i, mode in enumerate(MODES)),
    ],
)
async def test_a_target_without_numbers_ends_its_stream_after_what_came_before(
    mode: str, lookahead: Any, position: int, draft: Any, undo: str, autojump_clock: Any
) -> None:
    settings = {**MODES[mode], "lookahead": lookahead}
    target = ScriptedModel(failing_at(position, KINDS[position % 4]), **UNDOS[undo])
    draft = ScriptedModel(agreeing(0.7)) if draft == "a draft model" else draft
    async with simulated(target, draft, schedule=position) as simulation, trio.open_nursery() as nursery:

        async def one_beside() -> None:
            assert await text_of(simulation, OTHER, max_tokens=6, **settings) == continuation(OTHER, 6)

        nursery.start_soon(one_beside)
        stream = simulation.runtime.stream(PROMPT, max_tokens=12, reuse_prefix=True, **settings)
        got: list[int] = []
        with pytest.raises(NotANumberError, match=f"the target model gave .* at position {position};.*float16"):
            await read_into(got, stream)
        # Everything before the position was delivered, whoever drafted it.
        assert got == TEXT[: position - len(PROMPT)]
        with pytest.raises(NotANumberError):
            await anext(stream)
        await one_beside()
        # Nothing of it stays in the prefix cache; later streams start from caches of their own.
        await trio.sleep(1000)
        assert len(simulation.runtime._target.prefix_cache) == 0


async def test_logits_after_text_that_does_not_come_do_not_matter(autojump_clock: Any) -> None:
    def off_the_text(history: Sequence[int]) -> Sequence[float]:
        generated = list(history[len(PROMPT) :])
        return sure(history) if generated == continuation(PROMPT, len(generated)) else [math.nan] * VOCAB_SIZE

    for settings in MODES.values():
        async with simulated(ScriptedModel(off_the_text), ScriptedModel(agreeing(0.4))) as simulation:
            completion = await simulation.runtime.generate(PROMPT, max_tokens=12, lookahead=4, **settings)
            assert ids(completion.tokens) == TEXT
            assert completion.statistics.rejected > 0


# --- the drafter ----------------------------------------------------------------------------------


@sweep(
    "mode, position, chains", zip([*MODES, *MODES], itertools.cycle([5, 8, 11]), itertools.cycle([True, True, False]))
)
async def test_a_drafter_without_numbers_costs_no_token_and_leaves_that_session(mode, position, chains, autojump_clock):
    draft = ScriptedModel(failing_at(position, KINDS[position % 4], agreeing(0.9)))
    async with simulated(ScriptedModel(sure), draft, chains=chains) as simulation:
        settings = {**MODES[mode], "lookahead": 3}
        completion = await simulation.runtime.generate(PROMPT, max_tokens=12, **settings)
        assert ids(completion.tokens) == TEXT
        assert completion.statistics.draft_failures == 1
        assert len(simulation.instants("withdraw")) == 1
        again = await simulation.runtime.generate(OTHER, max_tokens=6, **settings)
        assert again.statistics.draft_failures == 0
        assert again.statistics.accepted > 0


# --- processors -----------------------------------------------------------------------------------


def leaving(what: float, at: int) -> Callable[[mx.array, mx.array], mx.array]:
    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.full(logits.shape, what) if tokens.size == at else logits

    return processor


@sweep("what", [math.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (math.inf, -math.inf))])
@sweep("lookahead, position", [(0, 5), (3, 11)])
@sweep("mode", ["greedy", "match", "rejection", "filters", "logprobs"])
async def test_processors_that_leave_nothing_end_the_stream_and_are_blamed(
    mode: str, lookahead: int, position: int, what: float, autojump_clock: Any
) -> None:
    async with simulated(ScriptedModel(sure), ScriptedModel(agreeing(0.7))) as simulation:
        processors = [runtime.stateless(leaving(what, position))]
        asked = {"lookahead": lookahead, "logits_processors": processors, **MODES[mode]}
        stream = simulation.runtime.stream(PROMPT, max_tokens=12, **asked)
        got: list[int] = []
        with pytest.raises(ProcessorError, match=f"logits processors.* at position {position}; forbid"):
            await read_into(got, stream)
        assert got == TEXT[: position - len(PROMPT)]
        assert await text_of(simulation, OTHER, max_tokens=6) == continuation(OTHER, 6)


@sweep("mode", ["greedy", "match", "rejection", "filters"])
@sweep("lookahead", [0, 3])
async def test_forbidding_all_tokens_but_one_is_legal(mode: str, lookahead: int, autojump_clock: Any) -> None:
    bias = {token: -math.inf for token in range(VOCAB_SIZE) if token != 17}
    async with simulated(ScriptedModel(sure), ScriptedModel(agreeing(0.7))) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=8, lookahead=lookahead, logit_bias=bias, **MODES[mode])
        assert await collect(stream) == [17] * 8


# --- the logit check ------------------------------------------------------------------------------


@sweep("dtype", [mx.float32, mx.float16, mx.bfloat16])
@sweep("width", [1, 2, 9, 31, 64, 4099])
def test_a_row_is_sound_just_where_all_are_numbers_and_one_is_finite(width: int, dtype: mx.Dtype) -> None:
    row = mx.random.normal((width,), key=mx.random.key(width)).astype(dtype)
    for place in {0, width // 2, width - 1}:
        for value in (math.nan, math.inf):
            rows = mx.stack([row, row, row])
            rows[1, place] = value
            assert LogitCheck.of(rows, rows).num_sound() == 1
            assert LogitCheck.of(mx.zeros_like(rows), rows).num_sound() == 1
    forbidden = mx.full((width,), -math.inf, dtype)
    assert LogitCheck.of(mx.stack([row, forbidden]), mx.stack([row, row])).num_sound() == 1
    forbidden[width - 1] = 0.0
    assert LogitCheck.of(mx.stack([row, forbidden]), mx.stack([row, row])).num_sound() == 2


# --- real models ----------------------------------------------------------------------------------


def damaged(model: nn.Module) -> nn.Module:
    """One weight is NaN, as after a faulty download."""
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[3, 5] = math.nan
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
async def test_a_damaged_target_is_said_to_be_and_the_runtime_goes_on(draft: str) -> None:
    drafters = {"none": None, "ngram": "ngram", "model": (llama(2), None)}
    async with runtime.open((damaged(llama(0)), None), drafters[draft]) as rt:
        for settings in ({}, {"temperature": 1.0}, {"temperature": 1.0, "seed": 1}):
            with pytest.raises(runtime.NotANumberError, match="at position 8"):
                await rt.generate(prompt_of(8), max_tokens=4, **settings)


async def test_numbers_that_overflow_in_float16_are_said_to() -> None:
    model = llama(0)
    model.set_dtype(mx.float16)
    model.model.embed_tokens.weight = model.model.embed_tokens.weight * 60_000.0
    model.model.norm.weight = model.model.norm.weight * 60_000.0
    mx.eval(model.parameters())
    async with runtime.open((model, None)) as rt:
        with pytest.raises(runtime.NotANumberError, match="overflowed in float16"):
            await rt.generate(prompt_of(8), max_tokens=4)


async def test_a_damaged_drafter_costs_no_token() -> None:
    target = llama(0)
    async with runtime.open((target, None), (damaged(near(target, noise=0.1)), None)) as rt:
        completion = await rt.generate(prompt_of(8), max_tokens=20, lookahead=2)
        assert ids(completion.tokens) == greedy(target, prompt_of(8), 20)
        assert completion.statistics.draft_failures == 1
