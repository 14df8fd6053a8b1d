"""When to send, when to draft ahead and when to rest: decisions over hand-made trees and prices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.lookahead import Chain, View, policy_for
from protocol.prices import Prices
from protocol.tree import Guess, LookaheadTree, Node

ROOT, POSITION = 100, 9

deterministic = settings(deadline=None, derandomize=True, max_examples=200)


def tree_of(*paths: tuple[tuple[int, float], ...]) -> LookaheadTree:
    """A tree with these paths of (token, confidence); the first to be drafted after a node is its choice."""
    tree = LookaheadTree(ROOT, POSITION)
    for path in paths:
        node = tree.root
        for token, confidence in path:
            rank = len(node.children)
            node = node.children.get(token) or tree.expand(node, Guess(token, confidence, rank=rank, raw=confidence))
    return tree


def chain_of(length: int, confidence: float = 0.5) -> LookaheadTree:
    return tree_of(tuple((i, confidence) for i in range(length)))


def at(tree: LookaheadTree, *path: int) -> Node:
    node = tree.root
    for token in path:
        node = node.children[token]
    return node


FORKED = (
    ((1, 0.9), (2, 0.5), (3, 0.4)),
    ((1, 0.9), (4, 0.3)),
    ((5, 0.1), (6, 0.8)),
)


def view_of(tree: LookaheadTree, **changes: Any) -> View:
    defaults = {"limit": 10, "depth": 100, "can_expand": lambda _: True, "width": lambda _: 1, "now": 0.0}
    return View(tree, **defaults | changes)


def stuck(_: Node) -> bool:
    return False


# --- what may be drafted after --------------------------------------------------------------------


def test_the_end_of_the_chain_is_what_lengthens_the_proposal():
    tree = tree_of(*FORKED)
    assert view_of(tree).growable() is at(tree, 1, 2, 3)
    assert view_of(LookaheadTree(ROOT, POSITION)).growable() is not None


@pytest.mark.parametrize("changes", [{"limit": 3}, {"depth": 3}, {"can_expand": stuck}])
def test_a_proposal_that_may_not_be_longer_is_not_lengthened(changes):
    assert view_of(tree_of(*FORKED), **changes).growable() is None


def test_a_node_is_open_while_nothing_is_after_it_and_it_is_not_too_deep():
    tree = tree_of(*FORKED)
    view = view_of(tree, depth=2)
    assert view.is_open(at(tree, 5)) is False
    assert view.is_open(at(tree, 5, 6)) is False
    assert view_of(tree, depth=3).is_open(at(tree, 5, 6)) is True
    assert view_of(tree, can_expand=stuck).is_open(at(tree, 5, 6)) is False


# --- a fixed lookahead ----------------------------------------------------------------------------


def policy_with(setting: Any, prices: Prices | None = None) -> Any:
    return policy_for(setting, prices or Prices(), "match")


@pytest.mark.parametrize("setting", [0, 1, 5, 64])
def test_a_number_is_a_proposals_length(setting):
    assert policy_with(setting) == Chain(setting)
    assert policy_with(setting).num_guesses == 1


def test_lookahead_zero_proposes_nothing_at_once():
    assert Chain(0).proposal(view_of(chain_of(0))) == []
    assert Chain(0).proposal(view_of(chain_of(3))) == []


chains = st.integers(0, 6).map(Chain)


@given(policy=chains, ready=st.integers(0, 9), limit=st.integers(0, 9), can_grow=st.booleans())
@deterministic
def test_a_proposal_waits_only_while_more_can_come_and_is_of_use(policy, ready, limit, can_grow):
    tree = chain_of(ready)
    proposed = policy.proposal(view_of(tree, limit=limit, can_expand=lambda _: can_grow))
    if can_grow and ready < policy.most and ready < limit:
        assert proposed is None
    else:
        assert proposed == tree.chain()[: min(ready, policy.most, limit)]


@given(policy=chains, depth=st.integers(0, 20), ready=st.integers(0, 20), due=st.none() | st.floats(0, 9))
@deterministic
def test_a_chain_is_drafted_as_far_as_it_is_of_use(policy, depth, ready, due):
    tree = chain_of(ready)
    for token in range(ready, 40):
        node = policy.expansion(view_of(tree, depth=depth, due=due))
        if node is None:
            break
        assert node is (tree.chain() or [tree.root])[-1]
        tree.expand(node, Guess(token, 0.5))
    assert len(tree.chain()) == max(ready, min(depth, 2 * policy.most + 1))


@given(policy=chains.filter(lambda policy: policy.most > 0))
@deterministic
def test_while_a_verdict_is_due_the_next_proposal_is_drafted(policy):
    # With every guess right the verdict commits a whole proposal and one token more.
    tree = chain_of(0)
    while (node := policy.expansion(view_of(tree, due=1.0))) is not None:
        tree.expand(node, Guess(tree.depth(node), 0.5))
    proposed = policy.proposal(view_of(tree))
    assert proposed is not None
    tree.advance(range(len(proposed) + 1))
    following = policy.proposal(view_of(tree))
    assert following is not None
    assert len(following) == policy.most


@given(most=st.integers(1, 6), ready=st.integers(0, 14))
@deterministic
def test_without_overlap_nothing_is_drafted_while_a_verdict_is_due(most, ready):
    policy = Chain(most, overlaps=False)
    assert policy.expansion(view_of(chain_of(ready), due=1.0)) is None
    tree = chain_of(min(ready, most - 1))
    assert policy.expansion(view_of(tree)) is view_of(tree).growable()


def test_a_fixed_lookahead_grows_no_branches():
    tree = tree_of(((1, 0.1), (2, 0.1)), ((5, 0.9),))
    assert Chain(4).expansion(view_of(tree)) is at(tree, 1, 2)


def test_a_fixed_lookahead_never_rests():
    for most in (0, 3):
        policy = Chain(most)
        assert (policy.should_rest(), policy.should_rest_on(9), policy.should_catch_up(9)) == (False, False, False)


guesses = st.lists(st.tuples(st.integers(0, 10**5), st.floats(0, 1)), max_size=12)


@given(policy=chains, one=guesses, other=guesses, limit=st.integers(0, 14), can_grow=st.booleans())
@deterministic
def test_decisions_over_a_chain_depend_on_its_depth_alone(policy, one, other, limit, can_grow):
    length = min(len(one), len(other))
    views = [
        view_of(tree_of(tuple(drawn[:length])), limit=limit, depth=limit, can_expand=lambda _: can_grow)
        for drawn in (one, other)
    ]
    proposals = [policy.proposal(view) for view in views]
    assert len({None if nodes is None else len(nodes) for nodes in proposals}) == 1
    expansions = [policy.expansion(view) for view in views]
    assert len({None if node is None else node.position for node in expansions}) == 1
