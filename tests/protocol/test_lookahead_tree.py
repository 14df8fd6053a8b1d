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
from trees import POSITION, ROOT, at, tree_of

from protocol.errors import ProtocolError
from protocol.lookahead_tree import COPIED, Guess, LookaheadTree, Node
from protocol.randomness import further

deterministic = settings(deadline=None, derandomize=True, max_examples=100)


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
    assert (tree.chain(), tree.frontier()) == ([], [tree.root])


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
def test_the_choice_of_copy_or_draft_ignores_the_drafted_token(token, worth, copy_first):
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
    tree = LookaheadTree(ROOT, POSITION)
    assert list(tree.outcomes(committed)) == []
    tree.expand(tree.root, Guess(3, 0.5), Guess(7, 0.3, rank=1), Guess(5, 0.1, rank=2))
    tree.expand(at(tree, 3), Guess(4, 0.6), Guess(9, 0.2, rank=1))
    tree.expand(at(tree, 7), Guess(8, 0.9))
    assert [(i, guess.token, was_right) for i, guess, was_right in tree.outcomes(committed)] == expected


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
TestAgainstPaths.settings = settings(deadline=None, derandomize=True, max_examples=60, stateful_step_count=30)
