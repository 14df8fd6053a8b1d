"""Advice: given where the statistics show that another setting would be faster, and only there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from scripted import ScriptedModel, agreeing, priced, simulated, truthful
from sweeps import sweep

from protocol.prices import Estimates
from protocol.statistics import MIN_ROUNDS, Counts, Statistics, modelled_speed_up

PRICES = {
    "verify_seconds": 0.02,
    "verify_seconds_per_token": 0.002,
    "draft_seconds": 0.004,
    "contention": 0.0,
    "plain_seconds": 0.0,
    "tokens_per_second": 0.0,
    "acceptance": 0.5,
}
GOOD = {"generated_tokens": 400, "rounds": 100, "accepted": 300, "rejected": 100, "lookahead_hits": 100}


def statistics(lookahead: Any = 4, prices: Any = None, **counts: Any) -> Statistics:
    return Counts(**GOOD | counts).snapshot(
        elapsed=10.0,
        generation_seconds=9.0,
        time_to_first_token=1.0,
        peak_memory=0,
        estimates=Estimates(**PRICES | (prices or {})),
        lookahead=lookahead,
    )


@sweep("lookahead", [4, "auto", None, 0])
def test_there_is_nothing_to_say_where_all_is_well(lookahead):
    assert statistics(lookahead).advice == ()


# A pass over five tokens costs four times as much as one over a single token, and yields two.
STEEP = {"verify_seconds_per_token": 0.015}
FEW = {"generated_tokens": 200, "accepted": 160, "rejected": 240, "lookahead_hits": 0, "lookahead_misses": 100}


def test_a_fixed_lookahead_that_does_not_pay_is_told_what_would():
    (sentence,) = statistics(4, STEEP, **FEW).advice
    # 2 tokens of 20 ms each in 80 ms of verifying and 16 of drafting.
    assert modelled_speed_up(statistics(4, STEEP, **FEW)) == pytest.approx(0.04 / 0.096)
    assert sentence.startswith("lookahead=4 decodes about 0.4× as fast as plain decoding would")
    assert sentence.endswith('use lookahead="auto"')
    assert statistics("auto", STEEP, **FEW).advice == ()


def test_what_is_plainly_decoded_is_what_it_was_measured_to_be():
    assert statistics(4, STEEP | {"plain_seconds": 0.06}, **FEW).advice == ()


def test_a_hit_costs_no_drafting_unless_the_drafter_cannot_keep_pace():
    slow = {"draft_seconds": 0.015}
    assert modelled_speed_up(statistics()) == pytest.approx(4 * 0.02 / 0.028)
    assert modelled_speed_up(statistics(prices=slow)) == pytest.approx(4 * 0.02 / 0.06)
    missed = {"lookahead_hits": 0, "lookahead_misses": 100}
    assert modelled_speed_up(statistics(prices=slow, **missed)) == pytest.approx(4 * 0.02 / 0.088)


@sweep(
    ("prices", "counts", "says"),
    [
        ({"draft_seconds": 0.025}, {}, "a draft step takes 25.0 ms and a decoding step of the target 20.0 ms"),
        ({}, {"accepted": 20, "rejected": 380, "generated_tokens": 120}, "only 5% of 400 drafted tokens were accepted"),
        ({}, {"n1_rounds": 90}, "in 90 of 100 rounds the caches could undo nothing (N=1)"),
        ({}, {"resting_rounds": 95}, "95 of 100 rounds were left to the target alone"),
        ({}, {"draft_failures": 1}, "the drafter failed, and the rest was decoded without it"),
    ],
)  # fmt: skip
def test_each_thing_that_stands_out_has_its_sentence(prices, counts, says):
    for lookahead in ("auto", None):
        (sentence,) = statistics(lookahead, prices, **counts).advice
        assert sentence.startswith(says)


@pytest.mark.parametrize("changes", [{"rounds": MIN_ROUNDS - 1}, {"rounds": 0}])
def test_a_few_rounds_say_nothing_yet(changes):
    assert statistics(4, STEEP, **FEW | changes).advice == ()


def test_nothing_is_said_of_prices_that_were_not_measured():
    unknown = dict.fromkeys(PRICES, 0.0)
    assert statistics(4, unknown).advice == ()
    assert modelled_speed_up(statistics(4, unknown)) is None


@pytest.mark.parametrize("plain_seconds", [0.002, 0.2])
def test_nothing_is_said_of_prices_that_cannot_be(plain_seconds):
    prices = {"draft_seconds": 0.025, "plain_seconds": plain_seconds}
    for lookahead in (4, "auto"):
        assert statistics(lookahead, prices, **FEW).advice == ()
    (sentence,) = statistics("auto", prices | {"plain_seconds": 0.021}, **FEW).advice
    assert sentence.startswith("a draft step takes 25.0 ms")


# --- of streams, in simulated time ----------------------------------------------------------------


async def test_a_fixed_lookahead_that_does_not_pay_says_so(autojump_clock: Any) -> None:
    models = ScriptedModel(truthful), ScriptedModel(agreeing(0.3))
    async with simulated(*models, price=priced()) as simulation:
        rt = simulation.runtime
        plain = (await rt.generate([1], max_tokens=60, lookahead=0)).statistics
        fixed = (await rt.generate([1], max_tokens=60, lookahead=16)).statistics
        assert fixed.generation_tps < plain.generation_tps
        assert any(sentence.startswith("lookahead=16 decodes about 0.") for sentence in fixed.advice)
        assert plain.advice == ()


async def test_a_lookahead_without_a_drafter_is_warned_of_once(autojump_clock: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "outrider"):
        async with simulated(ScriptedModel(truthful)) as simulation:
            for lookahead in (0, "auto"):
                await simulation.runtime.generate([1], max_tokens=2, lookahead=lookahead)
            assert caplog.messages == []
            for lookahead in (4, 2):
                await simulation.runtime.generate([1], max_tokens=2, lookahead=lookahead)
    (message,) = caplog.messages
    assert message.startswith('lookahead=4 has no effect, since there is no draft; open with draft="ngram"')
