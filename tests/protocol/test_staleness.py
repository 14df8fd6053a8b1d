"""Drafts of a trained drafter that are stale: it read hidden states of its own where the target had not given them yet.

Stale drafts are calibrated apart from fresh ones, and after a hit the policy decides by prices whether to propose them
at once, or to drop them for fresh ones that the target waits for.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario import Scenario
from scripted import agreeing, ids, next_token, priced, simulated, spike, truthful
from simulation import SimulatedRun, run_simulation
from sweeps import sweep
from trained_scripts import RecordingTarget, TrainedDraft
from trees import POSITION, ROOT, tree_of, view_of

from protocol.auto_policy import AutoPolicy
from protocol.calibration import Calibration
from protocol.lookahead_policy import ChainPolicy, PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree
from protocol.prices import Prices
from protocol.settings import MAX_LOOKAHEAD
from protocol.statistics import Statistics
from protocol.trace import Span

# --- calibration ----------------------------------------------------------------------------------


def taught(acceptances: dict[int, float], num: int = 100) -> Calibration:
    """A calibration that has seen how often guesses of each staleness were right."""
    calibration = Calibration()
    for i in range(num):
        for staleness, acceptance in acceptances.items():
            was_right = int((i + 1) * acceptance) > int(i * acceptance)
            calibration.observe(Guess(1, 0.6, raw=0.6, staleness=staleness), was_right)
    return calibration


def test_fresh_and_stale_guesses_of_the_same_confidence_are_told_apart():
    calibration = taught({0: 0.9, 2: 0.3})
    assert calibration(0, 0.6) > 0.8
    assert calibration(0, 0.6, 2) < 0.4
    assert calibration.expected(0) > 0.8
    assert calibration.expected(2) < 0.4


def test_neighbouring_stalenesses_are_learnt_together():
    calibration = taught({2: 0.3})
    assert calibration(0, 0.6, 3) == calibration(0, 0.6, 2)
    assert calibration(0, 0.6, 1) == pytest.approx(0.6, abs=0.02)
    assert calibration(0, 0.6, 1000) == calibration(0, 0.6, 8)


def test_an_unseen_staleness_is_expected_to_be_like_the_next_fresher():
    calibration = taught({0: 0.9, 2: 0.3})
    assert calibration.expected(1) == calibration.expected(0)
    assert calibration.expected(100) == calibration.expected(2)
    assert Calibration(mean_acceptance=0.4).expected(3) == 0.4


@given(seen=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40), raw=st.floats(0, 1))
@settings(deadline=None, derandomize=True)
def test_of_a_draft_model_as_much_is_expected_as_ever(seen, raw):
    calibration = Calibration()
    for its_raw, was_right in seen:
        calibration.observe(Guess(1, its_raw, raw=its_raw), was_right)
        assert calibration.expected(0) == calibration.mean_acceptance
    assert calibration(0, raw) == calibration(0, raw, 0)


def test_what_was_dropped_is_learnt_from_but_no_part_of_what_is_proposed():
    calibration = taught({0: 0.9})
    mean = calibration.mean_acceptance
    for _ in range(50):
        calibration.observe_dropped(Guess(1, 0.6, raw=0.6, staleness=4), False)
    assert calibration.expected(4) < 0.2
    assert calibration(0, 0.6, 4) < 0.2
    assert calibration.mean_acceptance == mean


def test_a_snapshot_stays_as_it_was():
    calibration = taught({0: 0.9, 2: 0.9})
    snapshot = calibration.snapshot()
    before = [(snapshot(0, 0.6, staleness), snapshot.expected(staleness)) for staleness in (0, 2)]
    for _ in range(50):
        calibration.observe(Guess(1, 0.6, raw=0.6, staleness=2), False)
        calibration.observe(Guess(1, 0.6, raw=0.6), False)
    assert [(snapshot(0, 0.6, staleness), snapshot.expected(staleness)) for staleness in (0, 2)] == before


# --- the tree -------------------------------------------------------------------------------------


def stale_chain(*guesses: tuple[float, int]) -> LookaheadTree:
    """A chain of (confidence, staleness)."""
    tree = LookaheadTree(ROOT, POSITION)
    node = tree.root
    for token, (confidence, staleness) in enumerate(guesses):
        node = tree.expand(node, Guess(token, confidence, raw=confidence, staleness=staleness))
    return tree


def test_what_was_drafted_ahead_becomes_stale_once_the_target_has_committed_what_came_before():
    tree = stale_chain(*((0.9, staleness) for staleness in range(5)))
    assert [tree.is_stale(node) for node in tree.chain()] == [False] * 5
    tree.advance([0, 1])
    assert [tree.is_stale(node) for node in tree.chain()] == [True] * 3
    # What is drafted after that has read hidden states of its own for the three alone.
    tree.expand(tree.chain()[-1], Guess(9, 0.5, staleness=3))
    assert [tree.is_stale(node) for node in tree.chain()] == [True] * 3 + [False]


def test_a_draft_models_nodes_are_never_stale():
    tree = tree_of(((0, 0.9), (1, 0.9), (2, 0.9)))
    tree.advance([0])
    assert [tree.is_stale(node) for node in tree.chain()] == [False] * 2


def test_after_a_drop_the_drafter_begins_at_the_root_anew_with_other_random_numbers():
    tree = tree_of(((0, 0.9), (1, 0.9)), ((5, 0.05), (6, 0.8)))
    root, trail, nodes = tree.root, tree.root.trail, tree.chain()
    assert [guess.token for guess in tree.drop_ahead()] == [0, 5]
    assert tree.root is root
    assert root.alive
    assert tree.chain() == []
    assert tree.frontier() == [root]
    assert not any(node.alive for node in nodes)
    again = tree.expand(root, Guess(0, 0.8))
    assert (again.position, again.reach) == (nodes[0].position, 0.8)
    assert root.trail != trail
    assert again.trail != nodes[0].trail


# --- use what is stale, or wait for a fresh draft -------------------------------------------------

STALENESS = 4


@cache
def priced_at(step: float, slope: float, rate: float, contention: float = 0.0) -> Prices:
    """A pass of the target takes 1 s, and `slope` more for each further token; a draft step takes `step`."""
    prices = Prices()
    for _ in range(12):
        for width in (1, 2, 4, 8, 12):
            prices.verify.observe(width, 0.0, 1.0 + slope * (width - 1))
            prices.verify.observe(width, step, 1.0 + slope * (width - 1) + contention * step)
            prices.draft_alone.observe(width, 0.0, step)
        prices.plain_decode_s.observe(1.0)
        prices.observe_round(round(100 * rate), 100.0)
    return prices


def deciding(fresh: float, stale: float, prices: Prices) -> AutoPolicy:
    return AutoPolicy(prices, known(fresh, stale))


@cache
def known(fresh: float, stale: float) -> Calibration:
    return taught({0: fresh, 1: fresh, 2: fresh, 4: stale, 8: stale}, 40)


def drops(policy: AutoPolicy, confidence: float, *tail: float, num_to_refresh: int = 4, **changes: Any) -> bool:
    guesses = [(each, STALENESS + i) for i, each in enumerate((confidence, *tail))]
    return policy.drops_stale(view_of(stale_chain(*guesses), num_to_refresh=num_to_refresh, **changes))


STEPS, SLOPES, RATES = (0.01, 0.1, 0.3, 1.0), (0.0, 0.05, 0.3), (1.0, 2.0, 3.0)
ACCEPTANCES = ((0.9, 0.2), (0.9, 0.6), (0.9, 0.85), (0.6, 0.3), (0.3, 0.2))
CONFIDENCES = (0.05, 0.3, 0.6, 0.95)


def best_gain(policy: AutoPolicy, reach: float, staleness: int, num_ready: int, wait_s: float) -> float:
    """The most tokens that a proposal may bring, less what its time would bring otherwise: over all lengths."""
    prices, gains = policy.prices, [0.0]
    reaches = itertools.accumulate(
        (policy.calibration.expected(staleness + i) for i in range(1, 10)), lambda a, b: a * b, initial=reach
    )
    reaches = list(itertools.takewhile(lambda each: each >= 0.02, reaches)) or [reach]
    step_s = prices.draft_s(1, beside_target=False)
    for length in range(1, len(reaches) + 1):
        num_waited_for = max(0, length - num_ready)
        drafting_s = wait_s + (num_waited_for - 1) * step_s if num_waited_for else 0.0
        cost_s = prices.verify(1 + length) - prices.verify(1) + drafting_s
        gains.append(sum(reaches[:length]) - prices.rate * cost_s)
    return max(gains)


@sweep("step", STEPS)
@sweep("slope", SLOPES)
def test_whichever_promises_more_tokens_for_its_time_is_done(step: float, slope: float):
    decisions = set()
    for rate, (fresh, stale), confidence in itertools.product(RATES, ACCEPTANCES, CONFIDENCES):
        policy = deciding(fresh, stale, priced_at(step, slope, rate))
        prices, expected = policy.prices, policy.calibration.expected
        wait_s = step / 2 + prices.draft_s(4, beside_target=False)
        num_ready = max(1, int(prices.verify(1) / prices.draft_s(1, beside_target=True)) - 1)
        share = min(1.0, (1 - expected(0)) / (1 - expected(STALENESS)))
        use = best_gain(policy, confidence, STALENESS, num_ready, wait_s)
        wait = best_gain(policy, 1 - share * (1 - confidence), 0, 0, wait_s)
        if abs(use - wait) > 0.02:
            assert drops(policy, confidence) is (wait > use), (rate, fresh, stale, confidence)
            decisions.add(wait > use)
    # A step that takes as long as a pass of the target is never worth waiting for, and a short one sometimes.
    assert (True in decisions) == (step < 1.0)


@sweep("step", STEPS)
@sweep("confidence", CONFIDENCES)
def test_stale_drafts_that_are_as_good_as_fresh_ones_are_used(step: float, confidence: float):
    assert not drops(deciding(0.7, 0.7, priced_at(step, 0.05, 2.0)), confidence)


def test_a_refresh_is_awaited_only_if_it_pays():
    assert drops(deciding(0.9, 0.4, priced_at(0.001, 0.05, 2.0)), 0.4)
    assert not drops(deciding(0.9, 0.4, priced_at(1.0, 0.05, 2.0)), 0.4)


def test_behind_passes_of_other_streams_a_refresh_costs_nothing():
    policy = deciding(0.9, 0.4, priced_at(1.0, 0.05, 2.0))
    assert drops(policy, 0.4, queue_slack_s=100.0)


def test_before_anything_was_measured_and_with_a_fixed_lookahead_what_is_there_is_used():
    assert not drops(AutoPolicy(Prices(), Calibration()), 0.1)
    assert not ChainPolicy(4).drops_stale(view_of(stale_chain((0.1, 4)), num_to_refresh=4))


tails = st.lists(st.floats(0.01, 0.99), max_size=6)


@given(
    confidence=st.floats(0.01, 0.99),
    one=tails,
    other=tails,
    tokens=st.tuples(st.integers(0, 50), st.integers(0, 50)),
    acceptances=st.sampled_from(ACCEPTANCES),
    step=st.sampled_from(STEPS),
    limit=st.integers(0, MAX_LOOKAHEAD),
)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_dropping_stale_drafts_ignores_tokens_and_what_follows(
    confidence, one, other, tokens, acceptances, step, limit
):
    """What was drafted after a token depends on which token it is: the rejection rule would not be exact."""
    policy = deciding_on(acceptances, step)
    decisions = set()
    for tail, token, is_drafting in ((one, tokens[0], True), (other, tokens[1], False)):
        tree = LookaheadTree(ROOT, POSITION)
        node = tree.expand(tree.root, Guess(token, confidence, raw=confidence, staleness=STALENESS))
        for i, each in enumerate(tail):
            node = tree.expand(node, Guess(i, each, raw=each, staleness=STALENESS + 1 + i))
        # A token that ends the text is not drafted after, so whether a step is under way depends on it, too.
        drafting = {"drafting_node": node, "drafting_until_s": 5.0} if is_drafting else {}
        decisions.add(policy.drops_stale(view_of(tree, num_to_refresh=4, max_proposal=limit, **drafting)))
    assert len(decisions) == 1


@cache
def deciding_on(acceptances: tuple[float, float], step: float) -> AutoPolicy:
    return deciding(*acceptances, priced_at(step, 0.05, 2.0))


# --- in simulated time ----------------------------------------------------------------------------

NUM_TOKENS = 160


class Using(AutoPolicy):
    """Proposes stale drafts at once."""

    def drops_stale(self, view: PolicyView) -> bool:
        return False


class Waiting(AutoPolicy):
    """Waits for fresh drafts."""

    def drops_stale(self, view: PolicyView) -> bool:
        return True


def simulate(kind: type[AutoPolicy], scenario: Scenario, num_tokens: int = NUM_TOKENS) -> SimulatedRun:
    def make_policy(settings: Any, prices: Prices) -> AutoPolicy:
        return kind(prices, prices.calibration("greedy"))

    return run_simulation(scenario, num_tokens=num_tokens, make_policy=make_policy)


def scenario_of(cost: float, stale: float, **changes: Any) -> Scenario:
    return Scenario(0.85, cost, stale_acceptance=stale, **changes)


def test_staleness_costs_acceptance_and_speed():
    speeds = []
    for stale in (0.85, 0.1):
        run = simulate(Using, scenario_of(0.1, stale))
        speeds.append(run.speed)
        fresh, of_stale = run.statistics.fresh_acceptance, run.statistics.stale_acceptance
        assert fresh is not None
        assert of_stale is not None
        if stale < 0.85:
            assert of_stale < fresh - 0.1
    assert speeds[0] > 1.2 * speeds[1]


def test_who_waits_for_fresh_drafts_proposes_no_stale_ones():
    statistics = simulate(Waiting, scenario_of(0.1, 0.5)).statistics
    assert statistics.lookahead_hits > 0
    assert statistics.stale_acceptance is None
    assert statistics.fresh_acceptance == statistics.acceptance_rate


def test_a_draft_model_is_always_fresh():
    statistics = run_simulation(Scenario(0.85, 0.1), num_tokens=40).statistics
    assert statistics.stale_acceptance is None
    assert statistics.fresh_acceptance == statistics.acceptance_rate


@pytest.mark.slow
@pytest.mark.parametrize(("cost", "stale", "better"), [(0.03, 0.45, Waiting), (0.3, 0.1, Using)])
def test_the_decision_is_near_the_better_of_both_fixed_choices(cost: float, stale: float, better: type[AutoPolicy]):
    speeds = {kind: simulate(kind, scenario_of(cost, stale), 300).speed for kind in (Using, Waiting, AutoPolicy)}
    (worse,) = {Using, Waiting} - {better}
    assert speeds[better] > 1.03 * speeds[worse]
    assert speeds[AutoPolicy] > 0.97 * speeds[better]


# --- in a trace -----------------------------------------------------------------------------------


def right_while_fresh(history: Any, staleness: int) -> Any:
    return spike((next_token(history) + (staleness > 5)) % 64)


async def text_and_drafts(**settings: Any) -> tuple[Statistics, list[Span], list[Span], list[int]]:
    price = priced(prefill=4.0, draft=2.0, verify=32.0)
    async with simulated(RecordingTarget(truthful), TrainedDraft(right_while_fresh), price=price) as simulation:
        completion = await simulation.runtime.generate([5, 6, 7, 8, 9], max_tokens=60, **settings)
    return (
        completion.statistics,
        simulation.spans("draft", "draft"),
        simulation.spans("target", "verify"),
        ids(completion.tokens),
    )


@pytest.mark.parametrize("lookahead", [2, 4, "auto"])
async def test_a_trained_drafter_drafts_inside_the_targets_passes(lookahead: Any, autojump_clock: Any) -> None:
    statistics, drafts, verifies, text = await text_and_drafts(lookahead=lookahead)
    assert text == [next_token([5, 6, 7, 8, 9, *text[:i]]) for i in range(60)]
    inside = [d for d in drafts if any(v.began <= d.began and d.ended <= v.ended for v in verifies)]
    assert len(inside) > 10
    assert statistics.lookahead_hits > 0
    assert statistics.draft_failures == 0


@sweep("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_a_trained_drafter_that_is_wrong_at_times_changes_no_text(seed: int, autojump_clock: Any) -> None:
    wrong = agreeing(0.6)

    def script(history: Any, staleness: int) -> Any:
        return (wrong if staleness > 1 else truthful)(history)

    async with simulated(RecordingTarget(truthful), TrainedDraft(script), schedule=seed) as simulation:
        completion = await simulation.runtime.generate([5, 6, 7], max_tokens=80)
        text = ids(completion.tokens)
    assert text == [next_token([5, 6, 7, *text[:i]]) for i in range(80)]
    assert completion.statistics.draft_failures == 0
    assert completion.statistics.rejected > 0
