"""Representations are short and contain what matters, also in error messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest
from models import llama
from scripted import ScriptedModel, simulated, truthful
from sweeps import sweep

import runtime
from protocol.prices import Estimates
from protocol.reprs import MAX_CHARACTERS, excerpt, shown, shown_path
from protocol.settings import settings_from
from protocol.statistics import Counts
from runtime.persistence.saved_session import SavedSession

LONG = "long text " * 1000


def statistics() -> runtime.Statistics:
    estimates = Estimates(**dict.fromkeys(attrs.fields_dict(Estimates), 0.123456789))
    counts = Counts(prompt_tokens=7, generated_tokens=4321, accepted=3, rejected=1, rounds=31)
    return counts.snapshot(
        elapsed=123.456789,
        generation_seconds=100.123456789,
        time_to_first_token=0.123456789,
        peak_memory=1,
        estimates=estimates,
    )


TOP = tuple(runtime.TopLogprob(i, LONG, -0.123456789) for i in range(128))
TOKEN = runtime.Token(
    312, LONG, 4, "copy", finish_reason="stop", logprob=-0.5, top_logprobs=TOP, stop_reason=LONG, is_thinking=True
)

SHORT: list[tuple[Any, list[str]]] = [
    (TOKEN, ["Token(id=312, text='long text", "…", "index=4", "drafted_by='copy'", "finish_reason='stop'"]),
    (runtime.Token(312, " a", 4, None), ["Token(id=312, text=' a', index=4, drafted_by=None)"]),
    (TOP[0], ["TopLogprob(id=0, text='long text", "logprob=-0.1235)"]),
    (
        runtime.Completion(LONG, (TOKEN,) * 96, "stop", statistics(), stop_reason=LONG, thinking=LONG),
        ["Completion, stop at 'long text", "96 tokens", "…"],
    ),
    (
        statistics(),
        ["4321 tokens in 31 rounds", "prompt of 7", "43.2 tokens/s", "75% of 4 proposed", "after 0.123 s"],
    ),
    (runtime.Settings(), ["Settings()"]),
    (runtime.Settings(temperature=0.8, seed=7), ["Settings(temperature=0.8, seed=7)"]),
    (runtime.Settings(stop=[LONG[:1000]] * 50, logit_bias=dict.fromkeys(range(9999), 1.0)), ["Settings(stop=(", "…"]),
    (runtime.Instant("draft", "proposal", 3, 1.5, tokens=(0, 1, 2) * 999), ["Instant(", "session=3", "(0, 1, 2,", "…"]),
    (runtime.Span("target", "verify", 3, 1.5, 2.5), ["Span(", "kind='verify'"]),
    (runtime.Health(True, None), ["Health(target=True, draft=None)"]),
    (
        SavedSession(
            messages=({"role": "user", "content": LONG},) * 3, tokens=tuple(range(9999)), thinking=None, settings={},
            num_processors=0, cache_options={}, vocabulary=None, target=LONG, draft=None,
        ),
        ["3 messages", "9999 tokens", "no draft model"],
    ),
]  # fmt: skip


@sweep(("value", "parts"), SHORT)
def test_what_is_printed_is_short_and_has_what_counts(value, parts):
    assert len(repr(value)) <= MAX_CHARACTERS
    for part in parts:
        assert part in repr(value)


async def test_streams_and_many_completions_say_how_far_they_are(autojump_clock: Any) -> None:
    async with simulated(ScriptedModel(truthful)) as simulation:
        stream = simulation.runtime.stream([1], max_tokens=3)
        await anext(stream)
        assert repr(stream) == "<outrider TokenStream, under way: 1 tokens given>"
        await stream.aclose()
        assert repr(stream) == "<outrider TokenStream, closed: 1 tokens given>"
        many = simulation.runtime.generate_many([[1], [2]], max_tokens=3)
        assert repr(many) == "<outrider Completions, under way: 0 of 2 given>"
        await many
        assert repr(many) == "<outrider Completions, over: 2 of 2 given>"

        async def one() -> AsyncIterator[list[int]]:
            yield [1]

        assert repr(simulation.runtime.generate_many(one())) == "<outrider Completions, under way: 0 given>"


# --- values in error messages ---------------------------------------------------------------------


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no")


@sweep(
    "value",
    [LONG, [LONG] * 1000, {"a": [LONG] * 9}, 10**5000, mx.zeros((100, 100)), np.zeros((100, 100)), Unprintable()],
)
def test_any_value_is_shown_on_one_short_line(value):
    assert 0 < len(shown(value)) <= MAX_CHARACTERS
    assert "\n" not in shown(value)


@sweep("value", [None, 1.5, -3, "warm", (1, 2), [True], {"a": 1}, {3}, 2**64, b"x"])
def test_a_short_value_is_shown_as_it_is(value):
    assert shown(value) == repr(value)


def test_an_excerpt_says_that_it_goes_on():
    assert excerpt("a" * 40) == repr("a" * 40)
    assert excerpt("a" * 41) == repr("a" * 39 + "…")
    assert excerpt("\x1b" * 100) == repr("\x1b" * 9 + "…")


@sweep(
    "settings",
    [
        {"lookahead": np.zeros((100, 100))},
        {"acceptance": np.zeros((100, 100))},
        {"max_tokens": -(10**5000)},
        {"temperature": LONG},
        {"stop": [[LONG] * 999]},
        {"stop_tokens": [LONG]},
        {"logit_bias": [LONG] * 999},
        {"logits_processors": [llama()] * 2 + [LONG]},
        {"sampler": [LONG] * 999},
        {"seed": np.zeros((100, 100))},
        {"ignore_eos": LONG},
        {LONG: 1},
    ],
)
def test_a_value_of_any_size_leaves_an_error_that_can_be_read(settings):
    with pytest.raises(runtime.SettingsError) as caught:
        settings_from(settings)
    assert len(str(caught.value)) < 900 if LONG in settings else len(str(caught.value)) < 400


def test_a_path_is_shown_whole_and_any_other_text_is_shortened():
    path = "/directory" * 20
    assert shown_path(path) == repr(path)
    assert shown_path(LONG) == repr(LONG[:999] + "…")
