"""The simulator: its models behave as the scenario says, and its times follow from it."""

from __future__ import annotations

import math
from functools import cache

import attrs
import mlx.core as mx
import pytest
import trio
from scenario import Scenario
from scripted_models import PROMPT, VOCAB_SIZE, ScriptedDraft, ScriptedTarget
from simulation import run_simulation

NUM_POSITIONS = 4000


def text(scenario: Scenario, length: int) -> tuple[int, ...]:
    """The target's own text, decoded one token at a time."""
    sequence, token, tokens = ScriptedTarget(scenario).open_sequence(beside_another=False), PROMPT[0], []
    for _ in range(length):
        token = argmaxes(sequence.feed((token,), 1))[0]
        tokens.append(token)
    return tuple(tokens)


@cache
def long_text(seed: int) -> tuple[int, ...]:
    """The text of every scenario with a seed."""
    return text(Scenario(0.5, 0.1, seed=seed), NUM_POSITIONS)


def argmaxes(rows: mx.array) -> list[int]:
    return mx.argmax(rows, axis=-1).tolist()


@attrs.frozen
class Drafted:
    """A draft along the true text: its two likeliest tokens and their probabilities, by position."""

    text: tuple[int, ...]
    first: list[int]
    second: list[int]
    confidence: list[float]
    confidence_of_second: list[float]

    def share_right(self, begin: int = 0, end: int | None = None) -> float:
        pairs = list(zip(self.first, self.text, strict=True))[begin:end]
        return sum(a == b for a, b in pairs) / len(pairs)


def drafted(scenario: Scenario, length: int = NUM_POSITIONS) -> Drafted:
    tokens = long_text(scenario.seed)[:length]
    rows = ScriptedDraft(scenario).open_sequence(beside_another=True).feed(PROMPT + tokens[:-1], length)
    probs = mx.softmax(rows, axis=-1).tolist()
    order = mx.argsort(rows, axis=-1).tolist()
    first, second = [row[-1] for row in order], [row[-2] for row in order]
    return Drafted(
        tokens,
        first,
        second,
        [row[token] for row, token in zip(probs, first, strict=True)],
        [row[token] for row, token in zip(probs, second, strict=True)],
    )


# --- the scripted pair ----------------------------------------------------------------------------


def test_the_draft_is_right_as_often_as_it_is_sure_of():
    d = drafted(Scenario(0.6, 0.1))
    right = [token == true for token, true in zip(d.first, d.text, strict=True)]
    second_right = [token == true for token, true in zip(d.second, d.text, strict=True)]
    for confidences, outcomes in ((d.confidence, right), (d.confidence_of_second, second_right)):
        bins: dict[int, list[tuple[float, bool]]] = {}
        for confidence, outcome in zip(confidences, outcomes, strict=True):
            bins.setdefault(int(confidence * 8), []).append((confidence, outcome))
        for of_bin in bins.values():
            expected = sum(confidence for confidence, _ in of_bin)
            variance = sum(confidence * (1 - confidence) for confidence, _ in of_bin)
            # The most likely token has at least an equal share of the probability, even if it is never right.
            queue_slack_s = 5 * math.sqrt(variance) + len(of_bin) / VOCAB_SIZE + 1
            assert abs(sum(outcome for _, outcome in of_bin) - expected) < queue_slack_s


def test_the_acceptance_changes_where_the_scenario_says():
    d = drafted(Scenario(1.0, 0.1, acceptance_changes=((1000, 0.0), (1500, 0.5))), 3000)
    assert d.share_right(0, 1000) == 1.0
    assert d.share_right(1000, 1500) == 0.0
    assert abs(d.share_right(1500) - 0.5) < 0.1


# --- playing a scenario ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kappa", [0.0, 0.5])
def test_a_scenario_comes_out_the_same_whatever_dice_the_scheduler_rolls(kappa):
    # With these round numbers, times would be sums of powers of two, and jobs would often end at the same moment, if
    # the simulator did not prevent that.
    scenario = Scenario(0.75, 0.25, contention=kappa, verify_slope=0.0)
    results = set()
    for dice in range(3):
        trio._core._run._r.seed(dice)
        result = run_simulation(scenario, num_tokens=100)
        results.add((result.seconds, attrs.evolve(result.statistics, peak_memory=0)))
    assert len(results) == 1


def test_a_table_of_times_is_interpolated_and_goes_on_as_it_ends():
    table = ((1, 0.02), (2, 0.02), (4, 0.05), (8, 0.09))
    scenario = Scenario(0.5, 0.25, verify_table=table, draft_table=((1, 2.0), (3, 3.0)))
    times = [scenario.verify_seconds(width) for width in (1, 2, 3, 4, 6, 8, 10)]
    assert times == pytest.approx([1.0, 1.0, 1.75, 2.5, 3.5, 4.5, 5.5])
    assert [scenario.draft_seconds(width) for width in (1, 2, 5)] == pytest.approx([0.25, 0.3125, 0.5])
    assert Scenario(0.5, 0.25, verify_table=((1, 3.0),)).verify_seconds(9) == 1.0
