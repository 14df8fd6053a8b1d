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
from sweeps import sweep

from actors.model import CachedSequence, Model, RewindMode
from protocol.errors import RewindError, SettingsError
from protocol.lookahead_policy import ChainPolicy

NUM_POSITIONS = 4000


def opened(model: Model) -> CachedSequence:
    sequence = model.open_sequence(beside_another=True)
    sequence.feed(PROMPT, 0)
    return sequence


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


@pytest.mark.slow
@sweep("acceptance", [0.3, 0.6, 0.85])
@sweep("spread", [0.5, 2.0, 50.0])
def test_the_draft_is_right_as_often_as_the_scenario_says(acceptance, spread):
    d = drafted(Scenario(acceptance, 0.1, spread=spread, seed=1))
    # Five standard errors of a share of so many positions.
    assert abs(d.share_right() - acceptance) < 5 * 0.5 / math.sqrt(NUM_POSITIONS)


@sweep("acceptance", [0, 0.0, 1, 1.0])
def test_a_draft_that_is_always_or_never_right_is_so_at_every_position(acceptance):
    assert drafted(Scenario(acceptance, 0.1), 500).share_right() == acceptance


@pytest.mark.parametrize("spread", [0.5, 2.0, 10.0])
def test_the_draft_is_right_as_often_as_it_is_sure_of(spread):
    d = drafted(Scenario(0.6, 0.1, spread=spread))
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


def test_a_small_spread_sets_positions_apart_and_a_large_one_does_not():
    def deviation(spread: float) -> float:
        confidence = drafted(Scenario(0.6, 0.1, spread=spread), 1000).confidence
        mean = sum(confidence) / len(confidence)
        return math.sqrt(sum((c - mean) ** 2 for c in confidence) / len(confidence))

    assert deviation(0.2) > 0.35
    assert 0.2 < deviation(2.0) < 0.35
    assert deviation(1000.0) < 0.03


@pytest.mark.parametrize("second_choice", [0.0, 0.5, 1.0])
def test_where_the_first_choice_is_wrong_the_second_is_right_as_often_as_asked(second_choice):
    d = drafted(Scenario(0.8, 0.1, spread=50.0, second_choice=second_choice))
    missed = [s == t for f, s, t in zip(d.first, d.second, d.text, strict=True) if f != t]
    assert abs(sum(missed) / len(missed) - second_choice) < 0.1


def test_an_overconfident_draft_says_the_same_and_is_surer_of_it():
    honest, boasting = drafted(Scenario(0.6, 0.1)), drafted(Scenario(0.6, 0.1, overconfidence=1.0))
    assert boasting.first == honest.first
    assert sum(boasting.confidence) / NUM_POSITIONS > 0.05 + sum(honest.confidence) / NUM_POSITIONS


def test_the_acceptance_changes_where_the_scenario_says():
    d = drafted(Scenario(1.0, 0.1, acceptance_changes=((1000, 0.0), (1500, 0.5))), 3000)
    assert d.share_right(0, 1000) == 1.0
    assert d.share_right(1000, 1500) == 0.0
    assert abs(d.share_right(1500) - 0.5) < 0.1


def test_after_a_wrong_token_the_text_goes_another_way():
    scenario = Scenario(0.6, 0.1)
    tokens = text(scenario, 50)
    wrong = ((tokens[0] + 1) % VOCAB_SIZE, *tokens[1:])
    after = argmaxes(opened(ScriptedTarget(scenario)).feed(wrong, 50))
    assert sum(a == b for a, b in zip(after[:-1], tokens[1:], strict=True)) < 10


def test_the_text_depends_on_the_seed_alone():
    tokens = text(Scenario(0.6, 0.1, seed=3), 50)
    assert text(Scenario(0.9, 1.0, contention=1.0, seed=3), 50) == tokens
    assert text(Scenario(0.6, 0.1, seed=4), 50) != tokens
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("model", [ScriptedTarget, ScriptedDraft])
def test_a_sequence_says_the_same_however_it_came_to_hold_its_tokens(model):
    scenario = Scenario(0.6, 0.1)
    tokens = text(scenario, 12)
    at_once = opened(model(scenario)).feed(tokens, len(tokens))

    sequence = opened(model(scenario))
    one_by_one = [sequence.feed((token,), 1) for token in tokens]
    assert mx.array_equal(mx.concatenate(one_by_one), at_once)

    assert sequence.prepare(3, 13) is RewindMode.TRIM
    sequence.feed((1, 2, 3), 0)
    assert sequence.rewind(1 + 5) == 6
    sequence.check(6)
    assert mx.array_equal(sequence.feed(tokens[5:], 7), at_once[5:])

    sequence.rewind(1 + 11)
    assert mx.array_equal(sequence.feed_lazy(mx.array([tokens[11]])), at_once[11:])
    sequence.check(13)


@pytest.mark.parametrize("model", [ScriptedTarget, ScriptedDraft])
def test_a_sequence_checks_its_length(model):
    sequence = opened(model(Scenario(0.6, 0.1)))
    assert sequence.feed((1, 2, 3), 0) is None
    with pytest.raises(RewindError, match="asked a script for length 5, it holds 4"):
        sequence.rewind(5)
    with pytest.raises(RewindError, match="should hold 3 tokens, it holds 4"):
        sequence.check(3)
    assert sequence.rewind(0) == 0
    sequence.check(0)


# --- playing a scenario ---------------------------------------------------------------------------


def test_plain_decoding_has_speed_one():
    result = run_simulation(Scenario(0.6, 0.1), num_tokens=50, lookahead=0)
    assert result.speed == pytest.approx(1.0)
    assert result.seconds == pytest.approx(50.0)
    assert result.statistics.generated_tokens == 50


def test_a_perfect_free_draft_is_worth_what_it_proposes():
    result = run_simulation(Scenario(1.0, 2**-10, verify_slope=0.0), num_tokens=400, lookahead=3)
    assert result.statistics.rounds == 100
    assert result.seconds == pytest.approx(100.0, abs=0.01)


def test_what_a_pass_costs_grows_with_its_width():
    scenario = Scenario(0.6, 0.1, verify_slope=0.5, draft_slope=0.25, overhead=0.125)
    assert [scenario.verify_seconds(m) for m in (1, 2, 5)] == [1.125, 1.625, 3.125]
    assert [scenario.draft_seconds(m) for m in (1, 5)] == [0.125 + 0.1, 0.125 + 0.2]
    assert Scenario(0.6, 0.1, verify_slope=0.5).draft_seconds(3) == 0.2


def test_contention_costs_speed():
    speeds = [
        run_simulation(Scenario(0.8, 0.1, contention=k), num_tokens=80, lookahead=4).speed for k in (0.0, 0.5, 1.0)
    ]
    assert speeds[0] > speeds[1] > speeds[2]


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


@pytest.mark.parametrize("lookahead", [1, 3])
def test_sequential_decoding_is_as_fast_as_theory_has_it(lookahead):
    """Leviathan et al. 2023, arXiv 2211.17192, theorem 3.8, for a verify pass that costs more than decoding."""
    acceptance, num_tokens = 0.8, 600
    # With this spread, confidence carries no information, so all positions are alike, as in the theory.
    scenario = Scenario(acceptance, 0.25, verify_slope=0.125, draft_slope=0.0, spread=1e6, seed=1)
    result = run_simulation(
        scenario, num_tokens=num_tokens, make_policy=lambda *_: ChainPolicy(lookahead, overlaps=False)
    )
    round_seconds = lookahead * 0.25 + 1.0 + 0.125 * lookahead
    # The last round may be shorter.
    assert result.seconds == pytest.approx(result.statistics.rounds * round_seconds, abs=round_seconds)
    tokens_per_round = (1 - acceptance ** (lookahead + 1)) / (1 - acceptance)
    # Five standard errors; a round has between 1 and lookahead + 1 tokens.
    error = 5 * 0.5 * lookahead / math.sqrt(result.statistics.rounds)
    assert result.statistics.tokens_per_round == pytest.approx(tokens_per_round, abs=error)
    assert result.speed == pytest.approx(tokens_per_round / round_seconds, rel=0.1)


def test_a_table_of_times_is_interpolated_and_goes_on_as_it_ends():
    table = ((1, 0.02), (2, 0.02), (4, 0.05), (8, 0.09))
    scenario = Scenario(0.5, 0.25, overhead=0.5, verify_table=table, draft_table=((1, 2.0), (3, 3.0)))
    times = [scenario.verify_seconds(width) - 0.5 for width in (1, 2, 3, 4, 6, 8, 10)]
    assert times == pytest.approx([1.0, 1.0, 1.75, 2.5, 3.5, 4.5, 5.5])
    assert [scenario.draft_seconds(width) - 0.5 for width in (1, 2, 5)] == pytest.approx([0.25, 0.3125, 0.5])
    assert Scenario(0.5, 0.25, verify_table=((1, 3.0),)).verify_seconds(9) == 1.0


@sweep(
    ("field", "value", "bound"),
    [
        ("acceptance", "0.5", "between 0 and 1"),
        ("cost_ratio", math.inf, "above 0"),
        ("verify_slope", -1.0, "of at least 0"),
        ("draft_slope", -1.0, "of at least 0"),
        ("overhead", -1.0, "of at least 0"),
        ("second_choice", 2.0, "between 0 and 1"),
        ("spread", 0.0, "above 0"),
        ("overconfidence", -0.5, "of at least 0"),
        ("acceptance_changes", ((0, 0.5),), "start at 1 and rise"),
        ("acceptance_changes", ((5, 0.5), (5, 0.6)), "start at 1 and rise"),
        ("acceptance_changes", ((5, 1.5),), "between 0 and 1"),
        ("acceptance_changes", (5,), "pairs"),
        ("verify_table", ((1, 1.0), (1, 2.0)), "start at 1 and rise"),
        ("verify_table", ((2, 1.0), (4, 2.0)), "begin with width 1"),
        ("verify_table", ((1, 0.0),), "above 0"),
        ("draft_table", (5,), "pairs"),
        ("seed", 0.5, "whole number"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(field, value, bound):
    with pytest.raises(SettingsError) as caught:
        Scenario(**{"acceptance": 0.5, "cost_ratio": 0.1, field: value})
    assert field in str(caught.value)
    assert bound in str(caught.value)
