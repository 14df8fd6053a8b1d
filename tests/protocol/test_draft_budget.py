"""A draft budget agrees with the policy: it never allows more, and allows less only where it cannot know."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from measured_prices import prices_of
from sweeps import sweep
from trees import POSITION, ROOT, at, chain_of, tree_of, view_of

from protocol.auto_policy import AutoPolicy
from protocol.calibration import Calibration
from protocol.lookahead_policy import EMPTY_BUDGET, ChainPolicy, DraftBudget, Policy, PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node
from protocol.prices import Prices

deterministic = settings(max_examples=80)


def priced(*, rate: float = 0.3, **measured: float) -> Prices:
    """Prices with a rate of speculative decoding."""
    prices = prices_of(base=8.0, **{"slope": 0.05, "step": 1.0, **measured})
    prices.observe_round(round(rate * 100), 100.0)
    return prices


def auto(prices: Prices, mean: float = 0.8, surprises: tuple[tuple[float, bool], ...] = ()) -> AutoPolicy:
    calibration = Calibration(mean_acceptance=mean)
    for raw, was_right in surprises:
        calibration.observe(Guess(0, raw, raw=raw), was_right)
    calibration.mean_acceptance = mean
    return AutoPolicy(prices, calibration)


def goes_on(policy: Policy, tree: LookaheadTree, choice: Node, **changes: Any) -> bool:
    """Whether the policy, asked after a step, lets the drafter continue after its choice."""
    view = view_of(tree, **changes)
    return (view.verdict_due_s is not None or policy.proposal(view) is None) and policy.expansion(view) is choice


# --- contents -------------------------------------------------------------------------------------


@sweep("steps", range(5))
def test_a_budget_allows_as_many_steps_as_it_says(steps):
    draft_budget: DraftBudget | None = DraftBudget(steps)
    for _ in range(steps):
        assert draft_budget.foresees_another(0.0)
        draft_budget = draft_budget.after(Guess(1, 0.0, raw=0.0), 0.0)
    assert not draft_budget.foresees_another(0.0)
    assert draft_budget.after(Guess(1, 1.0, raw=1.0), 0.0) is None


def believed(**changes: Any) -> DraftBudget:
    return attrs.evolve(DraftBudget(5, calibrate=lambda copy_kind, raw, staleness: raw, mean_acceptance=0.5), **changes)


def after(draft_budget: DraftBudget, raw: float) -> DraftBudget | None:
    return draft_budget.after(Guess(1, 0.0, raw=raw), 0.0)


def test_each_step_has_its_own_least_reach():
    draft_budget = believed(min_reaches=(0.1, 0.5, 0.2))
    draft_budget = after(after(draft_budget, 0.9), 0.9)
    assert after(draft_budget, 0.2) is None
    draft_budget = after(draft_budget, 0.3)
    assert after(draft_budget, 0.8) is None
    assert after(draft_budget, 0.9) is not None


def test_another_step_is_foreseen_where_an_average_choice_would_be_gone_on_after():
    assert believed(min_reaches=(0.4,)).foresees_another(0.0)
    assert not believed(min_reaches=(0.5,)).foresees_another(0.0)


# --- budgets of policies --------------------------------------------------------------------------


@given(
    most=st.integers(0, 6),
    ready=st.integers(0, 9),
    limit=st.integers(0, 9),
    depth=st.integers(0, 20),
    due=st.none() | st.just(5.0),
)
@deterministic
def test_of_a_fixed_lookahead_everything_is_known_beforehand(most, ready, limit, depth, due):
    policy, tree = ChainPolicy(most), chain_of(ready)
    changes = {"max_proposal": limit, "max_depth": depth, "verdict_due_s": due}
    node = policy.expansion(view_of(tree, **changes))
    if node is None or (due is None and policy.proposal(view_of(tree, **changes)) is not None):
        return
    draft_budget: DraftBudget | None = policy.draft_budget(view_of(tree, **changes), node)
    for token in range(ready, 50):
        choice = tree.expand(node, Guess(token, 0.5, raw=0.5))
        draft_budget = draft_budget.after(choice.guess, 0.0)
        assert (draft_budget is not None) == goes_on(policy, tree, choice, **changes)
        if draft_budget is None:
            return
        node = choice
    raise AssertionError("it never ended")


CONFIDENCES = st.floats(0.01, 0.99) | st.floats(0.8, 0.999)
STEPS = st.lists(CONFIDENCES, min_size=1, max_size=8)
POLICIES = st.builds(
    auto,
    st.builds(
        priced,
        step=st.sampled_from([0.1, 0.5, 1.0, 3.0]),
        delay=st.sampled_from([0.0, 0.3, 1.0]),
        slope=st.sampled_from([0.0, 0.06, 0.5]),
        rate=st.sampled_from([0.05, 0.2, 0.5]),
    ),
    st.sampled_from([0.3, 0.6, 0.9]),
    st.lists(st.tuples(CONFIDENCES, st.booleans()), max_size=20).map(tuple),
)


@pytest.mark.slow
@given(
    policy=POLICIES,
    drafted=st.lists(st.floats(0.1, 1.0), max_size=4),
    copied=st.lists(st.floats(0.1, 1.0), max_size=4),
    steps=STEPS,
    limit=st.integers(0, 12),
    depth=st.integers(1, 20),
    due=st.none() | st.floats(0.0, 10.0),
)
@settings(deterministic, max_examples=200)
def test_of_the_rules_as_much_is_known_as_what_the_steps_bring_decides(
    policy, drafted, copied, steps, limit, depth, due
):
    grown, now = tree_of(tuple(enumerate(drafted)), tuple(enumerate(copied, 100))), 0.0
    changes: dict[str, Any] = {"max_proposal": limit, "max_depth": depth, "verdict_due_s": due}
    node = policy.expansion(view_of(grown, **changes))
    if node is None or (due is None and policy.proposal(view_of(grown, **changes)) is not None):
        return
    draft_budget: DraftBudget | None = policy.draft_budget(view_of(grown, **changes), node)
    num_steps = 0
    for token, raw in enumerate(steps, 1000):
        now += policy.prices.draft_s(1, beside_target=due is not None)
        guess = policy.drafted(Guess(token, raw, raw=raw))
        choice = grown.expand(node, guess)
        draft_budget = draft_budget.after(guess, now)
        # Of two nodes with the same reach, either is right.
        ties = sum(other.open_reach == choice.open_reach for other in grown.frontier()) > 1
        if not ties:
            may_go_on = goes_on(policy, grown, choice, now_s=now, **changes)
            # Where a copy may turn out to be better than the choice, the drafter asks.
            assert (draft_budget is not None) == may_go_on or (copied and draft_budget is None)
        if draft_budget is None:
            break
        node, num_steps = choice, num_steps + 1
    event(f"steps that followed: {num_steps}")


def test_before_the_prices_are_known_the_drafter_asks():
    tree = LookaheadTree(ROOT, POSITION)
    assert AutoPolicy(Prices(), Calibration()).draft_budget(view_of(tree), tree.root) is EMPTY_BUDGET


@pytest.mark.parametrize("due", [None, 5.0])
def test_where_something_was_copied_the_drafter_asks(due):
    # The best token after it may be a copied one, not the drafter's choice.
    tree = LookaheadTree(ROOT, POSITION)
    tree.copy([Guess(1, 0.9, raw=0.9, copy_kind=0, worth=9.0)])
    policy = auto(priced())
    assert policy.draft_budget(view_of(tree, verdict_due_s=due), tree.root) is EMPTY_BUDGET
    assert policy.draft_budget(view_of(tree, verdict_due_s=due), at(tree, 1)).max_steps > 0
    tree.copy([Guess(1, 0.3, raw=0.3, copy_kind=0)])
    assert policy.draft_budget(view_of(tree, verdict_due_s=due), tree.root).max_steps > 0


@pytest.mark.parametrize("due", [None, 9.0])
def test_a_budget_refers_to_nothing_that_the_other_thread_changes(due):
    tree = LookaheadTree(ROOT, POSITION)
    policy = auto(priced())
    draft_budget = policy.draft_budget(view_of(tree, verdict_due_s=due), tree.root)
    values = [getattr(draft_budget, field.name) for field in attrs.fields(DraftBudget)]
    assert not any(isinstance(value, (Node, LookaheadTree, PolicyView, Prices, AutoPolicy)) for value in values)
    assert not any(value is policy.calibration for value in values)
