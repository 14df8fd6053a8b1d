"""When to send, when to draft ahead and when to rest: decisions over hand-made trees and prices."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_prices import prices_of
from sweeps import sweep
from trees import chain_of, tree_of, view_of

from protocol.auto_policy import MIN_REACH, AutoPolicy, policy_for
from protocol.lookahead_policy import ChainPolicy
from protocol.lookahead_tree import Guess, Node
from protocol.prices import Prices

deterministic = settings(max_examples=60)


# --- a fixed lookahead ----------------------------------------------------------------------------


def policy_with(setting: Any, prices: Prices | None = None) -> Any:
    return policy_for(setting, prices or Prices(), "match")


@sweep("setting", [0, 1, 5, 64])
def test_a_number_is_a_proposals_length(setting):
    assert policy_with(setting) == ChainPolicy(setting)


chains = st.integers(0, 6).map(ChainPolicy)


@given(policy=chains, ready=st.integers(0, 9), limit=st.integers(0, 9), can_grow=st.booleans())
@deterministic
def test_a_proposal_waits_only_while_more_can_come_and_is_of_use(policy, ready, limit, can_grow):
    tree = chain_of(ready)
    proposed = policy.proposal(view_of(tree, max_proposal=limit, can_expand=lambda _: can_grow))
    if can_grow and ready < policy.lookahead and ready < limit:
        assert proposed is None
    else:
        assert proposed == tree.chain()[: min(ready, policy.lookahead, limit)]


@given(policy=chains, depth=st.integers(0, 20), ready=st.integers(0, 20), due=st.none() | st.floats(0, 9))
@deterministic
def test_a_chain_is_drafted_as_far_as_it_is_of_use(policy, depth, ready, due):
    tree = chain_of(ready)
    for token in range(ready, 40):
        node = policy.expansion(view_of(tree, max_depth=depth, verdict_due_s=due))
        if node is None:
            break
        assert node is (tree.chain() or [tree.root])[-1]
        tree.expand(node, Guess(token, 0.5))
    assert len(tree.chain()) == max(ready, min(depth, 2 * policy.lookahead + 1))


@given(policy=chains.filter(lambda policy: policy.lookahead > 0))
@deterministic
def test_while_a_verdict_is_due_the_next_proposal_is_drafted(policy):
    # If every guess is right, the verdict commits a whole proposal and one more token.
    tree = chain_of(0)
    while (node := policy.expansion(view_of(tree, verdict_due_s=1.0))) is not None:
        tree.expand(node, Guess(tree.depth(node), 0.5))
    proposed = policy.proposal(view_of(tree))
    tree.advance(range(len(proposed) + 1))
    following = policy.proposal(view_of(tree))
    assert len(following) == policy.lookahead


guesses = st.lists(st.tuples(st.integers(0, 10**5), st.floats(0, 1)), max_size=12)


@given(policy=chains, one=guesses, other=guesses, limit=st.integers(0, 14), can_grow=st.booleans())
@deterministic
def test_decisions_over_a_chain_depend_on_its_depth_alone(policy, one, other, limit, can_grow):
    length = min(len(one), len(other))
    views = [
        view_of(tree_of(tuple(drawn[:length])), max_proposal=limit, max_depth=limit, can_expand=lambda _: can_grow)
        for drawn in (one, other)
    ]
    proposals = [policy.proposal(view) for view in views]
    assert len({None if nodes is None else len(nodes) for nodes in proposals}) == 1
    expansions = [policy.expansion(view) for view in views]
    assert len({None if node is None else node.position for node in expansions}) == 1


# --- the rules over measured prices ---------------------------------------------------------------


def auto(prices: Prices) -> AutoPolicy:
    policy = policy_with("auto", prices)
    assert isinstance(policy, AutoPolicy)
    return policy


trees = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=12).map(lambda path: tree_of(tuple(enumerate(path))))
paths = st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5)
# What was copied may be worth more or less than what was drafted.
forks = st.builds(
    lambda drafted, copied: tree_of(tuple(enumerate(drafted)), tuple(enumerate(copied, 100))), paths, paths
)


situations = st.builds(
    prices_of,
    slope=st.sampled_from([0.0, 0.05, 0.2, 0.6]),
    step=st.floats(0.02, 1.5),
    delay=st.sampled_from([0.0, 0.2, 0.6, 0.9]),
)


@given(tree=trees, prices=situations, limit=st.integers(0, 8), mean=st.floats(0, 1))
@deterministic
def test_the_proposed_part_of_the_chain_is_worth_most(tree, prices, limit, mean):
    policy = auto(prices)
    policy.calibration.mean_acceptance = mean
    view = view_of(tree, max_proposal=limit)
    nodes, chain = policy.proposal(view), tree.chain()[:limit]
    step_s = prices.draft_s(1, beside_target=False)

    def worth(reaches: list[float], num_steps: int = 0) -> float:
        """Tokens that a proposal may bring, less those that its time would bring otherwise."""
        cost_s = prices.verify(1 + len(reaches)) - prices.verify(1) + num_steps * step_s
        return sum(reaches) - prices.rate * cost_s

    drafted = [node.reach for node in chain]
    at_once = max(worth(drafted[:length]) for length in range(len(chain) + 1))
    later = -math.inf
    if (end := view.growable()) is not None:
        expected = [end.reach * mean**step for step in range(1, limit - len(chain) + 1)]
        expected = list(itertools.takewhile(lambda reach: reach >= MIN_REACH, expected))
        later = max((worth(drafted + expected[:n], n) for n in range(1, len(expected) + 1)), default=-math.inf)
    assert (nodes is None) == (later > at_once + 1e-9) or later == pytest.approx(at_once, abs=1e-9)
    if nodes is not None:
        assert nodes == chain[: len(nodes)]
        assert worth([node.reach for node in nodes]) == pytest.approx(at_once, abs=1e-9)


def stepped(rows_of_step: int, height: float) -> Prices:
    """A pass costs 1 s, and from some number of rows on as much more as the height of the step; 1 token/s."""
    prices = Prices()
    for _ in range(5):
        for rows in range(1, 20):
            prices.verify.observe(rows, 0.0, 1.0 + height * (rows >= rows_of_step))
        prices.observe_draft_step(1, 0.0, 100.0, beside_target=False)  # nobody waits for another token
        prices.plain_decode_s.observe(1.0)
    return prices


confidences = st.lists(st.floats(0.05, 0.99), max_size=5)


@given(
    one=confidences,
    other=confidences,
    common=st.lists(st.floats(0.3, 0.99), min_size=1, max_size=5),
    rows_of_step=st.integers(2, 8),
    height=st.floats(0.1, 3.0),
    mean=st.floats(0.2, 0.95),
)
@deterministic
def test_whether_a_token_is_proposed_does_not_depend_on_what_was_drafted_after_it(
    one, other, common, rows_of_step, height, mean
):
    """What is drafted after a token depends on which token it is: the rejection rule would not be exact."""
    policy = auto(stepped(rows_of_step, height))
    policy.calibration.mean_acceptance = mean

    def num_proposed(confidences: list[float]) -> int:
        tree = tree_of(tuple(enumerate(confidences)))
        return min(len(common), len(policy.proposal(view_of(tree, max_proposal=20))))

    assert num_proposed([*common, *one]) == num_proposed([*common, *other])


@given(raws=st.lists(st.floats(0.05, 0.99), max_size=30), prices=situations)
@deterministic
def test_of_a_copy_no_more_is_asked_for_than_may_be_proposed(raws, prices):
    policy, asked = auto(prices), list[Guess]()
    guesses = (Guess(token, raw, raw=raw, copy_kind=0) for token, raw in enumerate(raws))
    copied = policy.copied((asked.append(guess) or guess for guess in guesses), then_drafts=False)
    assert [guess.token for guess in copied] == [guess.token for guess in asked]
    reaches = list(itertools.accumulate((policy.calibration(0, raw) for raw in raws), operator.mul))
    gains = [
        sum(reaches[:length]) - prices.rate * (prices.verify(1 + length) - prices.verify(1))
        for length in range(len(raws) + 1)
    ]
    best = max(range(len(gains)), key=gains.__getitem__)
    assert len(copied) >= best or reaches[len(copied) - 1] < MIN_REACH
    # Not even sure tokens would be worth their price, which rises by the same for each.
    if len(copied) < len(raws):
        assert reaches[len(copied) - 1] <= max(MIN_REACH, prices.rate * prices.verify.per_row(5) + 1e-6)


@given(tree=trees | forks, prices=situations, left=st.floats(-0.5, 1.5))
@deterministic
def test_work_ahead_pays_and_takes_the_likeliest_node(tree, prices, left):
    view = view_of(tree, now_s=10.0, verdict_due_s=10.0 + left)
    step, saved = prices.draft_s(1, beside_target=True), prices.draft_s(1, beside_target=False)
    overrun = min(step, max(0.0, step - left))

    def is_worth_it(node: Node) -> bool:
        return node.open_reach * saved > prices.verify.target_slowdown * step + (1.0 - node.open_reach) * overrun

    likeliest = tree.frontier()[0]
    chosen = auto(prices).expansion(view)
    if chosen is None:
        assert likeliest.open_reach < 0.05 or not is_worth_it(likeliest)
    else:
        assert chosen.open_reach == likeliest.open_reach
        assert is_worth_it(chosen)


@given(tree=trees, prices=situations)
@deterministic
def test_on_its_turn_the_drafter_drafts_only_what_lengthens_the_proposal(tree, prices):
    view = view_of(tree)
    assert auto(prices).expansion(view) is view.growable()


@pytest.mark.parametrize(("confidence", "pays"), [(0.85, False), (0.99, True)])
def test_copied_tokens_are_fed_to_draft_after_them_only_if_they_are_likely_to_be_accepted(confidence, pays):
    prices = prices_of(slope=0.0, step=0.1)
    for _ in range(20):
        prices.observe_draft_step(6, 0.0, 0.6, beside_target=False)
    policy, tree = auto(prices), tree_of(copied=tuple((token, confidence) for token in range(6)))
    policy.calibration.mean_acceptance = 0.5

    def waits_for_draft(num_to_feed: int) -> bool:
        """Whether a token drafted after the copies is worth waiting for."""
        view = view_of(
            tree,
            can_expand=lambda node: node is not tree.root,
            num_to_feed=lambda node: 1 if node is tree.root else num_to_feed,
        )
        return policy.proposal(view) is None

    assert waits_for_draft(1)
    assert waits_for_draft(6) is pays


@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_where_speculating_is_modelled_to_be_slower_a_rest_is_taken_and_prolonged(mean):
    prices = prices_of(slope=0.5, step=1.0, delay=0.9)
    policy = auto(prices)
    policy.calibration.mean_acceptance = mean
    for _ in range(100):
        prices.observe_round(1, 3.0)
    assert policy.should_rest()
    assert policy.should_rest_on(8, 8)


def test_where_speculating_is_faster_no_rest_is_taken_nor_prolonged():
    prices = prices_of(slope=0.0, step=0.05)
    policy = auto(prices)
    policy.calibration.mean_acceptance = 0.9
    for _ in range(100):
        prices.observe_round(5, 1.0)
        assert not policy.should_rest()
    assert not policy.should_rest_on(8, 8)


def test_a_rest_in_which_little_was_generated_is_too_early_to_catch_up():
    prices = prices_of(slope=0.1, step=0.2, delay=0.5)
    policy = auto(prices)
    assert not policy.should_catch_up(3, 3)
    # A step over a few tokens delays the target by a tenth of a token's time.
    assert [policy.should_catch_up(each, each) for each in (4, 64)] == [False, True]
    assert not policy.should_catch_up(1000, 4)


def test_before_anything_was_measured_nobody_rests():
    assert not auto(Prices()).should_rest()


def test_a_copy_that_many_texts_wait_for_must_bring_more():
    def num_proposed(num_texts: int) -> int:
        prices = prices_of(slope=0.1, step=0.1)
        prices.num_texts, prices.num_copying = num_texts, num_texts
        policy = auto(prices)
        policy.only_copies = True
        return len(policy.worth_proposing(view_of(chain_of(3))))

    assert num_proposed(1) == 3
    assert num_proposed(8) < 3
