"""The lookahead tree against a model of plain paths, and the policy that grows it and proposes from it."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol.errors import ProtocolError
from protocol.lookahead import AUTO_AFTER_MISS, AUTO_MOST, Lookahead, lookahead_for
from protocol.tree import Guess, LookaheadTree, Node

ROOT, POSITION = 100, 9

deterministic = settings(deadline=None, derandomize=True, max_examples=200)


def tree_of(*paths: tuple[tuple[int, float], ...]) -> LookaheadTree:
    """A tree with these paths of (token, confidence) from the root."""
    tree = LookaheadTree(ROOT, POSITION)
    for path in paths:
        node = tree.root
        for token, confidence in path:
            node = node.children.get(token) or tree.expand(node, Guess(token, confidence))
    return tree


def at(tree: LookaheadTree, *path: int) -> Node:
    node = tree.root
    for token in path:
        node = node.children[token]
    return node


def tokens_of(nodes: list[Node]) -> list[int]:
    return [node.token for node in nodes]


FORKED = (
    ((1, 0.9), (2, 0.5), (3, 0.4)),
    ((1, 0.9), (4, 0.3)),
    ((5, 0.1), (6, 0.8)),
)

# --- the tree -------------------------------------------------------------------------------------


def test_a_new_tree_is_its_root_alone():
    tree = tree_of()
    assert (tree.root.token, tree.root.position, tree.root.reach) == (ROOT, POSITION, 1.0)
    assert tree.root.guess is None
    assert tree.chain() == []
    assert tree.frontier() == [tree.root]
    assert tree.path(tree.root) == []
    assert tree.depth(tree.root) == 0


def test_a_node_comes_one_position_after_its_parent():
    tree = tree_of(*FORKED)
    node = at(tree, 1, 2, 3)
    assert (node.position, tree.depth(node), tree.path(node)) == (POSITION + 3, 3, [1, 2, 3])


def test_reach_is_the_product_of_the_confidences_from_the_root():
    tree = tree_of(*FORKED)
    assert at(tree, 1, 2, 3).reach == pytest.approx(0.9 * 0.5 * 0.4)
    assert at(tree, 5, 6).reach == pytest.approx(0.1 * 0.8)


def test_the_chain_takes_the_likeliest_child_at_every_fork():
    assert tokens_of(tree_of(*FORKED).chain()) == [1, 2, 3]
    assert tokens_of(tree_of(((5, 0.1),), ((1, 0.9), (4, 0.3)), ((1, 0.9), (2, 0.5))).chain()) == [1, 2]


def test_among_equals_the_chain_takes_the_first_drafted():
    assert tokens_of(tree_of(((8, 0.5),), ((3, 0.5),)).chain()) == [8]


def test_the_frontier_is_the_leaves_likeliest_first():
    tree = tree_of(*FORKED)
    assert tokens_of(tree.frontier()) == [4, 3, 6]  # 0.27, 0.18, 0.08


def test_a_token_may_be_put_after_a_node_once():
    tree = tree_of(*FORKED)
    with pytest.raises(ProtocolError, match="already has token 2 after it"):
        tree.expand(at(tree, 1), Guess(2, 0.1))


def test_a_hit_keeps_what_was_drafted_beyond():
    tree = tree_of(*FORKED)
    new_root = at(tree, 1)
    assert tree.advance([1]) is True
    assert tree.root is new_root
    assert (tree.root.position, tree.root.parent, tree.root.reach) == (POSITION + 1, None, 1.0)
    assert tokens_of(tree.chain()) == [2, 3]
    assert at(tree, 2, 3).reach == pytest.approx(0.5 * 0.4)
    assert tree.path(at(tree, 2, 3)) == [2, 3]


def test_a_hit_on_a_leaf_leaves_the_root_alone():
    tree = tree_of(*FORKED)
    assert tree.advance([1, 4]) is True
    assert (tree.root.token, tree.root.position, tree.chain()) == (4, POSITION + 2, [])


@pytest.mark.parametrize("tokens", [[9], [1, 9], [1, 2, 9], [1, 2, 3, 9], [9, 9, 9]])
def test_a_miss_leaves_a_new_root_alone(tokens):
    tree = tree_of(*FORKED)
    old_root = tree.root
    assert tree.advance(tokens) is False
    assert tree.root is not old_root
    assert (tree.root.token, tree.root.position, tree.root.reach) == (9, POSITION + len(tokens), 1.0)
    assert (tree.root.alive, tree.root.children, tree.root.parent) == (True, {}, None)


def test_what_hangs_off_other_branches_is_dropped():
    tree = tree_of(*FORKED)
    kept = [at(tree, 1, 2), at(tree, 1, 2, 3)]
    dropped = [tree.root, at(tree, 1), at(tree, 1, 4), at(tree, 5), at(tree, 5, 6)]
    tree.advance([1, 2])
    assert all(node.alive for node in kept)
    assert not any(node.alive for node in dropped)


def test_a_dropped_node_cannot_be_drafted_after():
    tree = tree_of(*FORKED)
    dropped = [tree.root, at(tree, 5), at(tree, 1, 2, 3)]
    tree.advance([7])
    for node in dropped:
        with pytest.raises(ProtocolError, match="no longer in the tree"):
            tree.expand(node, Guess(50, 0.5))
        assert 50 not in node.children


def test_a_node_keeps_its_token_and_distribution_when_the_root_moves():
    probs = mx.array([0.25, 0.75])
    tree = LookaheadTree(ROOT, POSITION)
    first = tree.expand(tree.root, Guess(1, 0.5, probs))
    second = tree.expand(first, Guess(0, 0.5, probs))
    guesses = [first.guess, second.guess]
    tree.advance([1])
    assert [first.guess, second.guess] == guesses
    assert second.guess is not None
    assert second.guess.probs is probs


class AgainstPaths(RuleBasedStateMachine):
    """The tree does what a dictionary from paths to confidences does."""

    @initialize()
    def begin(self):
        self.tree = LookaheadTree(ROOT, POSITION)
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}
        self.confidences: dict[tuple[int, ...], float] = {}
        self.dropped: list[Node] = []
        self.position = POSITION

    @rule(data=st.data(), token=st.integers(0, 3), confidence=st.floats(0, 1))
    def expand(self, data, token, confidence):
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        guess = Guess(token, confidence)
        if (*path, token) in self.nodes:
            with pytest.raises(ProtocolError, match="already has token"):
                self.tree.expand(self.nodes[path], guess)
        else:
            self.nodes[*path, token] = self.tree.expand(self.nodes[path], guess)
            self.confidences[*path, token] = confidence

    @precondition(lambda self: self.dropped)
    @rule(data=st.data(), token=st.integers(0, 3))
    def expand_a_dropped_one(self, data, token):
        with pytest.raises(ProtocolError, match="no longer in the tree"):
            self.tree.expand(data.draw(st.sampled_from(self.dropped)), Guess(token, 0.5))

    @precondition(lambda self: self.confidences)
    @rule(data=st.data())
    def hit(self, data):
        self.advance(data.draw(st.sampled_from(sorted(self.confidences))))

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
    def advance(self, tokens):
        is_hit = tokens in self.nodes
        assert self.tree.advance(tokens) is is_hit
        kept = {path: node for path, node in self.nodes.items() if path[: len(tokens)] == tokens}
        self.dropped += [node for path, node in self.nodes.items() if path not in kept]
        self.nodes = {path[len(tokens) :]: node for path, node in kept.items()}
        self.confidences = {
            path[len(tokens) :]: confidence
            for path, confidence in self.confidences.items()
            if path in kept and path != tokens
        }
        if is_hit:
            assert self.tree.root is self.nodes[()]
        else:
            self.nodes[()] = self.tree.root
        assert self.tree.root.token == tokens[-1]
        self.position += len(tokens)

    @invariant()
    def nodes_are_the_models(self):
        for path, node in self.nodes.items():
            assert node.alive
            assert self.tree.path(node) == list(path)
            assert self.tree.depth(node) == len(path)
            assert node.position == self.position + len(path)
            assert node.reach == pytest.approx(
                math.prod(self.confidences[path[: i + 1]] for i in range(len(path))), rel=1e-9, abs=1e-300
            )
            assert set(node.children) == {p[-1] for p in self.nodes if p and p[:-1] == path}
            assert all(self.nodes[*path, token] is child for token, child in node.children.items())

    @invariant()
    def the_dropped_are_not_alive(self):
        assert not any(node.alive for node in self.dropped)

    @invariant()
    def the_frontier_is_the_leaves_in_order(self):
        frontier = self.tree.frontier()
        leaves = [node for node in self.nodes.values() if not node.children]
        assert sorted(map(id, frontier)) == sorted(map(id, leaves))
        assert [n.reach for n in frontier] == sorted((n.reach for n in leaves), reverse=True)

    @invariant()
    def the_chain_goes_down_to_a_leaf_by_the_likeliest(self):
        node = self.tree.root
        for following in self.tree.chain():
            assert following.parent is node
            assert following.reach == max(child.reach for child in node.children.values())
            node = following
        assert not node.children


TestAgainstPaths = AgainstPaths.TestCase
TestAgainstPaths.settings = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=30)


# --- the policy -----------------------------------------------------------------------------------


def chain_of(length: int) -> LookaheadTree:
    return tree_of(tuple((i, 0.5) for i in range(length)))


def test_auto_sends_early_and_takes_along_what_lies_ready():
    assert lookahead_for("auto") == Lookahead(enough=AUTO_AFTER_MISS, most=AUTO_MOST)
    assert 1 <= AUTO_AFTER_MISS <= AUTO_MOST


@pytest.mark.parametrize("setting", [0, 1, 5, 64])
def test_a_number_is_a_proposals_length(setting):
    assert lookahead_for(setting) == Lookahead(enough=setting, most=setting)


def test_lookahead_zero_proposes_nothing_at_once():
    assert lookahead_for(0).proposal(chain_of(0), 10, can_grow=True) == []
    assert lookahead_for(0).proposal(chain_of(3), 10, can_grow=True) == []


def policies():
    return st.integers(0, 6).flatmap(lambda most: st.builds(Lookahead, enough=st.integers(0, most), most=st.just(most)))


@given(policy=policies(), ready=st.integers(0, 9), limit=st.integers(0, 9), can_grow=st.booleans())
@deterministic
def test_a_proposal_waits_only_while_more_can_come_and_is_of_use(policy, ready, limit, can_grow):
    tree = chain_of(ready)
    proposed = policy.proposal(tree, limit, can_grow=can_grow)
    if can_grow and ready < policy.enough and ready < limit:
        assert proposed is None
    else:
        assert proposed == tree.chain()[: min(ready, policy.most, limit)]


@given(policy=policies(), reach_limit=st.integers(0, 20), ready=st.integers(0, 20))
@deterministic
def test_a_chain_is_drafted_as_far_as_it_is_of_use(policy, reach_limit, ready):
    tree = chain_of(ready)
    for token in range(ready, 40):
        node = policy.expansion(tree, reach_limit)
        if node is None:
            break
        assert node is (tree.chain() or [tree.root])[-1]
        tree.expand(node, Guess(token, 0.5))
    assert len(tree.chain()) == max(ready, min(reach_limit, policy.horizon))


@given(policy=policies().filter(lambda policy: policy.most > 0))
@deterministic
def test_while_a_verdict_is_due_the_next_proposal_is_drafted(policy):
    # With every guess right the verdict commits a whole proposal and one token more.
    tree = chain_of(policy.horizon)
    assert policy.expansion(tree, 100) is None
    proposed = policy.proposal(tree, 100, can_grow=True)
    assert proposed is not None
    tree.advance(range(len(proposed) + 1))
    following = policy.proposal(tree, 100, can_grow=True)
    assert following is not None
    assert len(following) == policy.most


def test_the_likeliest_leaf_that_is_not_too_deep_is_drafted_after_first():
    tree = tree_of(*FORKED)
    policy = Lookahead(enough=2, most=4)
    assert policy.expansion(tree, 100) is at(tree, 1, 4)
    assert policy.expansion(tree, 3) is at(tree, 1, 4)
    tree.expand(at(tree, 1, 4), Guess(7, 0.99))
    assert policy.expansion(tree, 3) is at(tree, 5, 6)
    assert policy.expansion(tree, 2) is None


guesses = st.lists(st.tuples(st.integers(0, 10**5), st.floats(0, 1)), max_size=12)


@given(policy=policies(), one=guesses, other=guesses, limit=st.integers(0, 14), can_grow=st.booleans())
@deterministic
def test_decisions_over_a_chain_depend_on_its_depth_alone(policy, one, other, limit, can_grow):
    length = min(len(one), len(other))
    trees = [tree_of(tuple(drawn[:length])) for drawn in (one, other)]
    proposals = [policy.proposal(tree, limit, can_grow=can_grow) for tree in trees]
    expansions = [policy.expansion(tree, limit) for tree in trees]
    assert (
        len({None if p is None else tuple(tree.depth(n) for n in p) for tree, p in zip(trees, proposals, strict=True)})
        == 1
    )
    assert len({None if node is None else node.position for node in expansions}) == 1


@given(
    shape=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1)), max_size=10),
    labels=st.permutations(range(10)),
    policy=policies(),
    limit=st.integers(0, 8),
    can_grow=st.booleans(),
)
@deterministic
def test_decisions_over_branches_do_not_depend_on_the_tokens_drawn(shape, labels, policy, limit, can_grow):
    decisions = []
    for names in (range(10), labels):
        tree = LookaheadTree(ROOT, POSITION)
        nodes = [tree.root]
        for name, (parent, confidence) in zip(names, shape, strict=False):
            nodes.append(tree.expand(nodes[parent % len(nodes)], Guess(name, confidence)))
        proposed = policy.proposal(tree, limit, can_grow=can_grow)
        expanded = policy.expansion(tree, limit)
        decisions.append(
            (
                None if proposed is None else [nodes.index(node) for node in proposed],
                None if expanded is None else nodes.index(expanded),
            )
        )
    assert decisions[0] == decisions[1]
