"""The target queue as the drafter sees it; and concurrent streams are no slower than one after another."""

from __future__ import annotations

import pytest
from measured_prices import prices_of
from scenario import Scenario
from simulation import SimulatedStreams, simulate_streams
from trees import chain_of, view_of

from protocol.auto_policy import AutoPolicy
from protocol.calibration import Calibration
from protocol.lookahead_policy import EMPTY_BUDGET, PolicyView
from protocol.target_queue import TargetQueue

# --- estimated times ------------------------------------------------------------------------------


def passes(max_batch: int = 1) -> TargetQueue:
    """A queue of passes that take as many seconds as they have rows."""
    return TargetQueue(float, max_batch)


def test_remaining_time_is_the_running_pass_and_those_behind():
    target_queue = passes()
    assert (target_queue.is_busy, target_queue.remaining_s(5.0)) == (False, 0.0)
    for session, num_tokens in ((1, 4), (2, 2), (3, 1)):
        target_queue.enter(session, num_tokens)
    target_queue.begin([1], now_s=10.0)
    assert target_queue.is_busy
    assert target_queue.remaining_s(12.0) == 2.0 + 2.0 + 1.0
    assert target_queue.remaining_s(12.0, 7) == 2.0 + 2.0 + 1.0 + 7.0
    assert target_queue.remaining_s(20.0) == 2.0 + 1.0  # it takes longer than expected
    target_queue.leave(1, now_s=15.0)
    target_queue.begin([2], now_s=15.0)
    assert target_queue.remaining_s(16.0) == 1.0 + 1.0
    target_queue.leave(3, now_s=16.0)  # taken back
    target_queue.leave(2, now_s=17.0)
    assert (target_queue.is_busy, target_queue.remaining_s(17.0)) == (False, 0.0)


def test_rounds_that_share_a_pass_are_as_wide_as_the_widest_of_them():
    target_queue = passes(max_batch=3)
    for session, num_tokens in ((1, 4), (2, 2), (3, 1), (4, 5), (5, 1)):
        target_queue.enter(session, num_tokens)
    assert target_queue.remaining_s(0.0) == 3 * 4 + 2 * 5
    assert target_queue.remaining_s(0.0, 6) == 3 * 4 + 3 * 6
    target_queue.begin([2, 3, 5], now_s=1.0)
    assert target_queue.remaining_s(2.0) == 3 * 2 - 1 + 2 * 5


def test_the_passes_of_others_are_those_behind_and_the_one_that_runs_before():
    target_queue = passes()
    for session, num_tokens in ((1, 4), (2, 2), (3, 1)):
        target_queue.enter(session, num_tokens)
    target_queue.begin([1], now_s=0.0)
    assert [target_queue.others_s(session) for session in (1, 2, 3, 4)] == [3.0, 5.0, 6.0, 7.0]
    shared = passes(max_batch=2)
    for session, num_tokens in ((1, 4), (2, 2), (3, 1), (4, 3)):
        shared.enter(session, num_tokens)
    shared.begin([1, 2], now_s=0.0)
    # Behind its own pass, 1 has that of 3 and 4; 3 goes with 4, and 1 and 2 come back.
    assert [shared.others_s(session) for session in (1, 3)] == [2 * 3, 2 * 4]


def test_the_target_was_busy_if_it_is_or_a_pass_ended_since():
    target_queue = passes()
    assert not target_queue.was_busy_since(0.0)
    target_queue.enter(1, 4)
    target_queue.begin([1], now_s=10.0)
    assert target_queue.was_busy_since(12.0)
    target_queue.leave(1, now_s=14.0)
    target_queue.leave(1, now_s=20.0)  # it is no longer in the queue
    assert [target_queue.was_busy_since(moment) for moment in (13.0, 14.0, 15.0)] == [True, False, False]


# --- decisions of the rules -----------------------------------------------------------------------


def after(num_drafted: int, *, confidence: float = 0.6, queue_slack_s: float, due: float | None = None) -> PolicyView:
    return view_of(chain_of(num_drafted, confidence), queue_slack_s=queue_slack_s, verdict_due_s=due)


def auto(slowdown: float = 0.0, core_hold_s: float = 0.0) -> AutoPolicy:
    """A policy where a pass takes 1 s and 50 ms a token, and a draft step 400 ms, `slowdown` of which delay a pass."""
    prices = prices_of(slope=0.05, step=0.4, delay=slowdown, core_hold_s=core_hold_s)
    return AutoPolicy(prices, Calibration(mean_acceptance=0.6))


def test_while_the_target_has_others_passes_it_is_no_loss_to_draft_on():
    assert auto().proposal(after(1, queue_slack_s=0.0)) is not None
    assert auto().proposal(after(1, queue_slack_s=0.4)) is None
    # A step that ends after the queue costs the time from the queue's end to its own.
    assert auto().proposal(after(1, queue_slack_s=0.05)) is not None


def test_cores_that_a_step_keeps_from_others_passes_have_their_price():
    busy, idle = after(1, queue_slack_s=0.4), after(1, queue_slack_s=0.0)
    assert auto(slowdown=0.1).proposal(busy) is None
    assert auto(slowdown=0.1, core_hold_s=5.0).proposal(busy) is not None
    # Without passes beside it, nothing is slowed down.
    length = [len(auto(slowdown=0.1, core_hold_s=hold_s).proposal(idle) or ()) for hold_s in (0.0, 5.0)]
    assert length[0] == length[1] > 0


def test_a_token_dearer_than_its_worth_deserves_no_slack():
    assert auto().proposal(after(6, queue_slack_s=100.0)) is not None


def test_nothing_is_drafted_ahead_that_others_passes_hide_or_wait_for():
    for queue_slack_s, expected in ((0.0, True), (0.5, True), (10.0, False), (float("inf"), False)):
        view = after(2, confidence=0.9, queue_slack_s=queue_slack_s, due=5.0)
        assert (auto().expansion(view) is not None) is expected


def test_a_budget_ends_where_the_passes_of_others_do():
    view = after(0, queue_slack_s=0.9)
    assert auto().draft_budget(view, view.tree.root).max_steps == 2
    assert auto().draft_budget(view, view.tree.root) != EMPTY_BUDGET
    alone = after(0, queue_slack_s=0.0)
    assert auto().draft_budget(alone, alone.tree.root).max_steps == 9


# --- in simulated time ----------------------------------------------------------------------------


def both(
    scenario: Scenario, num_streams: int, lookahead: int | str = "auto", num_tokens: int = 150
) -> tuple[SimulatedStreams, SimulatedStreams]:
    """The same streams one after another, and at once."""
    alone, at_once = (
        simulate_streams(scenario, num_streams, at_once=at_once, num_tokens=num_tokens, lookahead=lookahead)
        for at_once in (False, True)
    )
    return alone, at_once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_streams", "acceptance", "cost", "slope", "contention", "min_speed_ratio"),
    [
        (2, 0.3, 0.2, 0.3, 0.3, 0.98),  # drafting gains nothing here, and costs nearly nothing
        (2, 0.85, 0.1, 0.06, 0.0, 1.15),
        (5, 0.6, 0.35, 0.06, 0.0, 1.15),
        (5, 0.3, 0.2, 0.3, 1.0, 0.98),
    ],
)
def test_streams_at_once_are_not_slower_than_one_after_another(
    num_streams, acceptance, cost, slope, contention, min_speed_ratio
):
    alone, at_once = both(Scenario(acceptance, cost, verify_slope=slope, contention=contention), num_streams)
    assert at_once.speed >= min_speed_ratio * alone.speed


def test_a_target_whose_streams_take_turns_nearly_always_has_a_proposal_of_one():
    scenario = Scenario(0.85, 0.5, contention=0.3)
    in_turns = simulate_streams(scenario, 5, at_once=True, num_tokens=60, lookahead="auto", max_batch=1)
    assert in_turns.busy_seconds["target"] >= 0.9 * in_turns.seconds


@pytest.mark.slow
def test_shared_passes_are_not_much_slower_on_a_saturated_device():
    # A single text says little when the two are even.
    ratios = []
    for seed in range(3):
        alone, at_once = both(Scenario(0.85, 0.1, contention=1.0, seed=seed), 2)
        ratios.append(at_once.speed / alone.speed)
    assert sum(ratios) / len(ratios) >= 0.98


@pytest.mark.parametrize("lookahead", [0, 4])
def test_nor_are_they_with_a_fixed_lookahead(lookahead):
    alone, at_once = both(Scenario(0.7, 0.2, contention=0.3), 3, lookahead, 60)
    assert at_once.speed >= 0.999 * alone.speed


def test_two_streams_guess_less_ahead_than_one():
    alone, at_once = both(Scenario(0.6, 0.1), 2, num_tokens=75)

    def steps_per_token(played: SimulatedStreams) -> float:
        return played.busy_seconds["draft"] / 0.1 / 150

    # Shared steps included; over many seeds, the ratio is 0.70 on average.
    assert steps_per_token(at_once) < 0.75 * steps_per_token(alone)
    assert at_once.speed > alone.speed


@pytest.mark.slow
def test_what_others_take_of_the_targets_time_is_no_reason_to_rest():
    _, at_once = both(Scenario(0.8, 0.1), 6)
    # Early on, when little is known, a rest of some rounds may begin.
    assert sum(each.resting_rounds for each in at_once.statistics) < sum(each.rounds for each in at_once.statistics) / 2
    # R is the rate of all streams together, not of each; of about as many as there are when a stream ends.
    assert max(each.estimates.tokens_per_second for each in at_once.statistics) > 0.7 * at_once.speed


def test_a_prompt_that_was_read_beside_a_draft_step_is_remembered():
    queue = TargetQueue()
    assert not queue.was_busy_since(0.0)
    queue.begin_reading()
    assert queue.was_busy_since(9.0)
    queue.end_reading(10.0)
    assert queue.was_busy_since(9.0)
    assert not queue.was_busy_since(10.0)
