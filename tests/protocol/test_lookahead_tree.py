"""The lookahead tree, compared with a dictionary of paths."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sweeps import sweep
from trees import POSITION, ROOT, at

from protocol.errors import ProtocolError
from protocol.lookahead_tree import COPIED, Guess, LookaheadTree, Node
from protocol.randomness import further

deterministic = settings(deadline=None, derandomize=True, max_examples=100)


def tree_of(*paths: tuple[tuple[int, float], ...]) -> LookaheadTree:
    """A tree with these paths of (token, confidence) from the root."""
    tree = LookaheadTree(ROOT, POSITION)
    for path in paths:
        node = tree.root
        for token, confidence in path:
            node = node.children.get(token) or tree.expand(node, Guess(token, confidence))
    return tree


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


def test_an_expansion_puts_the_choice_and_its_runners_up_after_a_node():
    tree = LookaheadTree(ROOT, POSITION)
    choice = tree.expand(tree.root, Guess(3, 0.5), Guess(7, 0.3, rank=1), Guess(5, 0.1, rank=2))
    assert choice is tree.root.choice is at(tree, 3)
    assert {child.token: child.reach for child in tree.root.children.values()} == {3: 0.5, 7: 0.3, 5: 0.1}
    assert all(child.parent is tree.root for child in tree.root.children.values())
    assert tokens_of(tree.frontier()) == [3, 7, 5]


def test_the_chain_follows_the_choices_also_where_a_correction_is_likelier():
    tree = LookaheadTree(ROOT, POSITION)
    node = tree.expand(tree.root, Guess(3, 0.2), Guess(7, 0.7, rank=1))
    tree.expand(at(tree, 7), Guess(8, 1.0))
    tree.expand(node, Guess(4, 0.1), Guess(9, 0.9, rank=1))
    assert tokens_of(tree.chain()) == [3, 4]


def test_the_chain_goes_on_from_a_correction_that_came_true():
    tree = LookaheadTree(ROOT, POSITION)
    tree.expand(tree.root, Guess(3, 0.5), Guess(7, 0.3, rank=1))
    tree.expand(at(tree, 7), Guess(8, 0.9), Guess(6, 0.05, rank=1))
    assert tree.advance([7]) is True
    assert tokens_of(tree.chain()) == [8]
    assert tree.root.reach == 1.0


def test_there_is_no_chain_below_corrections_alone():
    tree = LookaheadTree(ROOT, POSITION)
    assert tree.root.choice is None
    tree.expand(tree.root, Guess(7, 0.3, rank=1))
    assert tree.root.choice is None
    assert tree.chain() == []


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


@sweep("tokens", [[9], [1, 9], [1, 2, 9], [1, 2, 3, 9], [9, 9, 9]])
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


# --- copies ---------------------------------------------------------------------------------------


def copied(token: int, confidence: float, worth: float) -> Guess:
    return Guess(token, confidence, rank=COPIED, worth=worth)


@pytest.mark.parametrize("worth", [0.5, 3.0])
@pytest.mark.parametrize("token", [1, 2])
@pytest.mark.parametrize("copy_first", [True, False])
def test_whether_a_copy_or_a_draft_is_proposed_does_not_depend_on_which_token_was_drafted(token, worth, copy_first):
    tree, drafted = LookaheadTree(ROOT, POSITION), Guess(token, 0.7, worth=2.0)
    if copy_first:
        tree.copy([copied(1, 0.9, worth)])
    tree.expand(tree.root, drafted)
    if not copy_first:
        tree.copy([copied(1, 0.9, worth)])
    choice = tree.root.choice
    assert (choice.best is drafted) == (worth < 2.0)
    assert choice.reach == (0.7 if worth < 2.0 else 0.9)


def test_another_copy_takes_the_place_of_one_and_leaves_what_was_drafted():
    tree = LookaheadTree(ROOT, POSITION)
    tree.copy([copied(1, 0.9, 3.0), copied(2, 0.9, 2.0), copied(3, 0.9, 1.0)])
    drafted, alone = at(tree, 1), at(tree, 1, 2, 3)
    tree.expand(drafted, Guess(7, 0.4))
    assert (drafted.reach, drafted.open_reach) == (0.9, pytest.approx(0.0))
    tree.copy([copied(5, 0.5, 4.0)])
    assert tokens_of(tree.chain()) == [5]
    assert (alone.alive, drafted.alive, drafted.best, drafted.reach) == (False, True, None, 0.0)
    tree.copy([copied(1, 0.9, 3.0)])
    assert tokens_of(tree.chain()) == [1, 7]
    assert at(tree, 1, 7).reach == pytest.approx(0.9 * 0.4)


def test_a_drafter_that_goes_on_where_a_copy_ends_lengthens_the_chain():
    tree = LookaheadTree(ROOT, POSITION)
    tree.copy([copied(1, 0.9, 3.0), copied(2, 0.8, 2.0)])
    assert tree.frontier() == [at(tree, 1, 2), at(tree, 1), tree.root]
    tree.expand(at(tree, 1, 2), Guess(3, 0.5), Guess(4, 0.2, rank=1))
    assert tokens_of(tree.chain()) == [1, 2, 3]
    assert tree.advance([1, 2]) is True
    assert tokens_of(tree.chain()) == [3]


# --- trails ---------------------------------------------------------------------------------------


def trail_of(tokens: list[int]) -> int:
    trail = 0
    for token in tokens:
        trail = further(trail, token)
    return trail


def test_a_trail_is_that_of_the_text_from_the_first_root_on():
    tree = tree_of(*FORKED)
    assert tree.root.trail == trail_of([ROOT])
    assert at(tree, 1, 2, 3).trail == trail_of([ROOT, 1, 2, 3])


@given(
    verdicts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5),
    drafted=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=6, max_size=6),
)
@deterministic
def test_equal_texts_have_equal_trails_by_hit_and_by_miss(verdicts, drafted):
    """Whatever was drafted in between, and in however many steps it was committed."""
    tree, text = LookaheadTree(ROOT, POSITION), [ROOT]
    for verdict, path in zip([*verdicts, []], drafted, strict=False):
        node = tree.root
        for token in path:
            node = node.children.get(token) or tree.expand(node, Guess(token, 0.5))
        assert tree.root.trail == trail_of(text)
        assert node.trail == trail_of(text + path)
        if verdict:
            tree.advance(verdict)
            text += verdict


def test_different_texts_have_different_trails():
    texts = [list(text) for length in range(7) for text in itertools.product(range(4), repeat=length)]
    assert len({trail_of(text) for text in texts}) == len(texts)


# --- outcomes of guesses --------------------------------------------------------------------------


def forked_by_choice() -> LookaheadTree:
    """3, or else 7 or 5; after 3 comes 4, or else 9; after 7 comes 8."""
    tree = LookaheadTree(ROOT, POSITION)
    tree.expand(tree.root, Guess(3, 0.5), Guess(7, 0.3, rank=1), Guess(5, 0.1, rank=2))
    tree.expand(at(tree, 3), Guess(4, 0.6), Guess(9, 0.2, rank=1))
    tree.expand(at(tree, 7), Guess(8, 0.9))
    return tree


@sweep(
    ("committed", "expected"),
    [
        ([3], [(0, 3, True), (0, 7, False), (0, 5, False)]),
        ([3, 4], [(0, 3, True), (0, 7, False), (0, 5, False), (1, 4, True), (1, 9, False)]),
        ([3, 9, 1], [(0, 3, True), (0, 7, False), (0, 5, False), (1, 4, False), (1, 9, True)]),
        ([7, 2], [(0, 3, False), (0, 7, True), (0, 5, False), (1, 8, False)]),
        ([5, 2, 4], [(0, 3, False), (0, 7, False), (0, 5, True)]),
        # Nothing is known about the nodes of another branch.
        ([1, 4], [(0, 3, False), (0, 7, False), (0, 5, False)]),
    ],
)
def test_every_guess_along_a_text_was_right_or_wrong(committed, expected):
    tree = forked_by_choice()
    assert [(i, guess.token, was_right) for i, guess, was_right in tree.outcomes(committed)] == expected


def test_where_nothing_was_guessed_nothing_was_right_or_wrong():
    assert list(LookaheadTree(ROOT, POSITION).outcomes([1, 2, 3])) == []


# --- any tree -------------------------------------------------------------------------------------


class AgainstPaths(RuleBasedStateMachine):
    """The tree behaves like a dictionary from paths to confidences."""

    @initialize()
    def begin(self):
        self.tree = LookaheadTree(ROOT, POSITION)
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}
        self.confidences: dict[tuple[int, ...], float] = {}
        self.dropped: list[Node] = []
        self.position = POSITION

    @rule(
        data=st.data(),
        guesses=st.lists(
            st.builds(Guess, st.integers(0, 3), st.floats(0, 1), rank=st.integers(0, 2)),
            min_size=1,
            max_size=3,
            unique_by=lambda guess: guess.token,
        ),
    )
    def expand(self, data, guesses):
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        taken = [guess.token for guess in guesses if (*path, guess.token) in self.nodes]
        if taken:
            with pytest.raises(ProtocolError, match=f"already has token {taken[0]}"):
                self.tree.expand(self.nodes[path], *guesses)
            # None of them is added, including those before the one that was rejected.
            guesses = []
        else:
            assert self.tree.expand(self.nodes[path], *guesses).token == guesses[0].token
        for guess in guesses:
            self.nodes[*path, guess.token] = self.nodes[path].children[guess.token]
            self.confidences[*path, guess.token] = guess.confidence

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
    def the_chain_goes_down_by_the_choices(self):
        node = self.tree.root
        for following in [*self.tree.chain(), None]:
            choices = [child for child in node.children.values() if child.guess.rank == 0]
            assert node.choice is following
            assert (following in choices) if choices else following is None
            assert all(child.guess.confidence <= following.guess.confidence for child in choices)
            node = following


TestAgainstPaths = AgainstPaths.TestCase
TestAgainstPaths.settings = settings(deadline=None, derandomize=True, max_examples=150, stateful_step_count=30)
