"""Several simulated streams at once: what a shared pass costs, and what follows from it."""

from __future__ import annotations

import attrs
import pytest
import trio
from scenario import Scenario
from simulation import SimulatedStreams, rows_of, simulate_streams

from protocol.trace import Share, Span

# Passes of any width take the same time.
FLAT = Scenario(0.8, 0.1, verify_slope=0.0, draft_slope=0.0)


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


@pytest.mark.parametrize("lookahead", [0, 3, "auto"])
def test_with_a_batch_of_one_streams_take_turns(lookahead):
    turns = simulate_streams(FLAT, 3, num_tokens=30, lookahead=lookahead, max_batch=1)
    assert turns.texts_per_pass == 1.0
    assert turns.rows_per_pass == pytest.approx(1.0 if lookahead == 0 else turns.rows_per_pass)
    one_by_one = simulate_streams(FLAT, 3, num_tokens=30, lookahead=lookahead, max_batch=1, at_once=False)
    assert turns.speed >= 0.999 * one_by_one.speed
    assert turns.longest_wait > one_by_one.longest_wait


def test_streams_do_not_depend_on_random_scheduling_or_touch_it():
    results = set()
    for dice in range(3):
        trio._core._run._r.seed(dice)
        before = trio._core._run._r.getstate()
        results.add(without_memory(simulate_streams(Scenario(0.75, 0.25, contention=0.5), 4, num_tokens=25)))
        assert trio._core._run._r.getstate() == before
    assert len(results) == 1
