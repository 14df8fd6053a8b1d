"""Several simulated streams at once: what a shared pass costs, and what follows from it."""

from __future__ import annotations

import attrs
import pytest
import trio
from scenario import Scenario
from simulation import SimulatedStreams, rows_of, run_simulation, simulate_streams
from sweeps import sweep

from protocol.errors import SettingsError
from protocol.trace import Share, Span

# Passes of any width take the same time.
FLAT = Scenario(0.8, 0.1, verify_slope=0.0, draft_slope=0.0)
# Part of the streams that are in a pass at least, where all decode plainly.
MIN_COMPANY = 0.6


def without_memory(streams: SimulatedStreams) -> SimulatedStreams:
    """The result without the memory of this process, which no seed decides."""
    return attrs.evolve(streams, statistics=tuple(attrs.evolve(each, peak_memory=0) for each in streams.statistics))


def test_texts_that_share_a_pass_are_padded_to_the_widest():
    shares = tuple(Share(session, 0, width) for session, width in enumerate((1, 5, 2)))
    assert rows_of(Span("target", "verify", None, 0.0, 1.0, num_tokens=8, shares=shares)) == 15
    assert rows_of(Span("target", "verify", 7, 0.0, 1.0, num_tokens=8)) == 8


def test_a_pass_costs_what_all_its_rows_do():
    # Every pass takes as many units of time as it has rows, so the time is the number of rows.
    per_row = Scenario(0.8, 0.1, verify_slope=1.0, draft_slope=0.0)
    for lookahead in (0, 3):
        streams = simulate_streams(per_row, 4, num_tokens=40, lookahead=lookahead)
        num_passes = sum(each.rounds for each in streams.statistics) / streams.texts_per_pass
        assert streams.texts_per_pass > 1.05  # sharing gains nothing here
        assert streams.target_busy * streams.seconds == pytest.approx(num_passes * streams.rows_per_pass)


@pytest.mark.parametrize("num_streams", [2, 16])
def test_with_free_rows_plain_streams_speed_up_by_their_number(num_streams):
    streams = simulate_streams(FLAT, num_streams, num_tokens=100, lookahead=0)
    assert MIN_COMPANY * num_streams <= streams.speed <= num_streams
    assert streams.speed == pytest.approx(streams.texts_per_pass, rel=0.02)


def test_where_rows_are_free_drafted_streams_gain_by_company_too():
    alone, together = (simulate_streams(FLAT, number, num_tokens=50, lookahead=2) for number in (1, 4))
    assert together.speed >= 1.5 * alone.speed
    assert together.rows_per_pass > together.texts_per_pass > 1.5


@pytest.mark.parametrize("lookahead", [0, 3, "auto"])
def test_with_a_batch_of_one_streams_take_turns(lookahead):
    turns = simulate_streams(FLAT, 3, num_tokens=30, lookahead=lookahead, max_batch=1)
    assert turns.texts_per_pass == 1.0
    assert turns.rows_per_pass == pytest.approx(1.0 if lookahead == 0 else turns.rows_per_pass)
    one_by_one = simulate_streams(FLAT, 3, num_tokens=30, lookahead=lookahead, max_batch=1, at_once=False)
    assert turns.speed >= 0.999 * one_by_one.speed
    assert turns.longest_wait > one_by_one.longest_wait


def test_one_stream_is_what_a_simulation_of_one_text_is():
    scenario = Scenario(0.7, 0.2, contention=0.3)
    streams, alone = simulate_streams(scenario, 1, num_tokens=60), run_simulation(scenario, num_tokens=60)
    assert streams.speed == streams.steady_speed == pytest.approx(alone.speed)
    assert streams.texts_per_pass == 1.0
    assert streams.acceptance_rate == alone.statistics.acceptance_rate
    assert streams.target_busy <= 1.0


def test_streams_have_texts_of_their_own():
    streams = simulate_streams(Scenario(0.6, 0.1), 4, num_tokens=40, lookahead=2, max_batch=1, at_once=False)
    assert len({each.accepted for each in streams.statistics}) > 2


def test_a_wait_is_between_two_tokens_of_one_stream():
    # Three streams that decode plainly in turns: each waits for the two others.
    streams = simulate_streams(FLAT, 3, num_tokens=20, lookahead=0, max_batch=1)
    assert streams.longest_wait == pytest.approx(3.0)
    assert simulate_streams(FLAT, 3, num_tokens=1, lookahead=0).longest_wait == 0.0


def test_until_the_first_stream_ends_all_are_at_work():
    streams = simulate_streams(FLAT, 6, num_tokens=40, lookahead=4)
    assert streams.steady_speed > streams.speed


def test_streams_do_not_depend_on_random_scheduling_or_touch_it():
    results = set()
    for dice in range(3):
        trio._core._run._r.seed(dice)
        before = trio._core._run._r.getstate()
        results.add(without_memory(simulate_streams(Scenario(0.75, 0.25, contention=0.5), 4, num_tokens=25)))
        assert trio._core._run._r.getstate() == before
    assert len(results) == 1


@sweep(
    ("arguments", "says"),
    [
        ({"num_streams": 0}, "num_streams must be a whole number between 1 and 64, got 0"),
        ({"num_streams": 65}, "between 1 and 64, got 65"),
        ({"num_streams": 2, "max_batch": 0}, "max_batch must be a whole number between 1 and 64, got 0"),
        ({"num_streams": 2, "max_batch": 65}, "between 1 and 64, got 65"),
        ({"num_streams": 2, "lookahead": 65}, "lookahead must be a whole number between 0 and 64"),
        ({"num_streams": 2, "num_tokens": 0}, "max_tokens must be a whole number of at least 1"),
    ],
)
def test_streams_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(SettingsError) as caught:
        simulate_streams(FLAT, **arguments)
    assert says in str(caught.value)
