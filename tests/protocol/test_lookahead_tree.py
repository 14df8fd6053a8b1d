"""The lookahead tree, compared with a dictionary of paths."""

from __future__ import annotations

import itertools
import math

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sweeps import sweep
from trees import POSITION, ROOT, at, tree_of

from protocol.errors import ProtocolError
from protocol.lookahead_tree import Guess, LookaheadTree, Node
from protocol.randomness import further

deterministic = settings(max_examples=100)


# --- copies ---------------------------------------------------------------------------------------


def copied(token: int, confidence: float, worth: float) -> Guess:
    return Guess(token, confidence, copy_kind=0, worth=worth)


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


# --- trails ---------------------------------------------------------------------------------------


def trail_of(tokens: list[int]) -> int:
    trail = 0
    for token in tokens:
        trail = further(trail, token)
    return trail


@given(
    verdicts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=5),
    copied=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=6, max_size=6),
)
@deterministic
def test_equal_texts_have_equal_trails_by_hit_and_by_miss(verdicts, copied):
    """Whatever was copied in between, and in however many steps it was committed."""
    tree, text = LookaheadTree(ROOT, POSITION), [ROOT]
    for verdict, path in zip([*verdicts, []], copied, strict=False):
        tree.copy([Guess(token, 0.5, copy_kind=0) for token in path])
        assert tree.root.trail == trail_of(text)
        assert at(tree, *path).trail == trail_of(text + path)
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
        ([3], [(0, 3, True)]),
        ([3, 4], [(0, 3, True), (1, 4, True)]),
        ([3, 9, 1], [(0, 3, True), (1, 4, False)]),
        # What was drafted after a copy counts where the copy came true.
        ([7, 2], [(0, 3, False), (1, 8, False)]),
        ([7, 8, 4], [(0, 3, False), (1, 8, True)]),
        # Nothing is known about the nodes of another branch.
        ([1, 4], [(0, 3, False)]),
    ],
)
def test_every_guess_along_a_text_was_right_or_wrong(committed, expected):
    tree = tree_of(((3, 0.5), (4, 0.6)), ((7, 0.3),))
    tree.expand(at(tree, 7), Guess(8, 0.9))
    assert [(i, guess.token, was_right) for i, guess, was_right in tree.outcomes(committed)] == expected
    assert list(tree_of().outcomes(committed)) == []


# --- any tree -------------------------------------------------------------------------------------


@attrs.define
class Modelled:
    """What the model knows of a node: the confidences of its guess and its copy, and whether it is expanded."""

    guess: float | None = None
    copy: float | None = None
    is_expanded: bool = False

    @property
    def worth(self) -> tuple[float, bool]:
        """Of the better of both, and whether it was drafted; below 0 if there is neither."""
        drafted, copied = (-1.0 if confidence is None else confidence for confidence in (self.guess, self.copy))
        return max((drafted, True), (copied, False))


class AgainstPaths(RuleBasedStateMachine):
    """The tree behaves like a dictionary from paths to guesses and copies."""

    @initialize()
    def begin(self):
        self.tree = LookaheadTree(ROOT, POSITION)
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}
        self.known: dict[tuple[int, ...], Modelled] = {(): Modelled()}
        self.dropped: list[Node] = []
        self.position = POSITION

    def add(self, path):
        self.known.setdefault(path, Modelled())
        self.nodes[path] = at(self.tree, *path)

    @rule(data=st.data(), token=st.integers(0, 3), confidence=st.floats(0, 1))
    def expand(self, data, token, confidence):
        path = data.draw(st.sampled_from(sorted(self.nodes)))
        guess = Guess(token, confidence)
        if self.known[path].is_expanded:
            with pytest.raises(ProtocolError, match=f"already has a drafted token after it, and got {token}"):
                self.tree.expand(self.nodes[path], guess)
            return
        assert self.tree.expand(self.nodes[path], guess).token == token
        self.add((*path, token))
        self.known[path].is_expanded = True
        self.known[*path, token].guess = confidence

    @rule(copied=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1)), max_size=4))
    def copy(self, copied):
        self.tree.copy([Guess(token, confidence, copy_kind=0) for token, confidence in copied])
        for path in sorted(self.known, key=len, reverse=True):
            known = self.known[path]
            known.copy = None
            is_parent = any(other[: len(path)] == path for other in self.known if other != path)
            if path and known.guess is None and not known.is_expanded and not is_parent:
                del self.known[path]
                self.dropped.append(self.nodes.pop(path))
        for end in range(1, len(copied) + 1):
            path = tuple(token for token, _ in copied[:end])
            self.add(path)
            self.known[path].copy = copied[end - 1][1]

    @precondition(lambda self: self.dropped)
    @rule(data=st.data(), token=st.integers(0, 3))
    def expand_a_dropped_one(self, data, token):
        with pytest.raises(ProtocolError, match="no longer in the tree"):
            self.tree.expand(data.draw(st.sampled_from(self.dropped)), Guess(token, 0.5))

    @precondition(lambda self: len(self.known) > 1)
    @rule(data=st.data())
    def hit(self, data):
        self.advance(data.draw(st.sampled_from(sorted(self.known)[1:])))

    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
    def advance(self, tokens):
        is_hit = tokens in self.nodes
        assert self.tree.advance(tokens) is is_hit
        self.dropped += [node for path, node in self.nodes.items() if path[: len(tokens)] != tokens]
        self.nodes = {path[len(tokens) :]: node for path, node in self.nodes.items() if path[: len(tokens)] == tokens}
        self.known = {path[len(tokens) :]: known for path, known in self.known.items() if path[: len(tokens)] == tokens}
        if is_hit:
            assert self.tree.root is self.nodes[()]
        else:
            self.nodes[()], self.known[()] = self.tree.root, Modelled()
        assert self.tree.root.token == tokens[-1]
        self.position += len(tokens)

    @invariant()
    def nodes_are_the_models(self):
        for path, node in self.nodes.items():
            assert node.alive
            assert self.tree.path(node) == list(path)
            assert self.tree.depth(node) == len(path)
            assert node.position == self.position + len(path)
            confidences = [max(0.0, self.known[path[: i + 1]].worth[0]) for i in range(len(path))]
            assert node.reach == pytest.approx(math.prod(confidences), rel=1e-9, abs=1e-300)
            assert node.is_expanded is self.known[path].is_expanded
            assert set(node.children) == {p[-1] for p in self.nodes if p and p[:-1] == path}
            assert all(self.nodes[*path, token] is child for token, child in node.children.items())

    @invariant()
    def the_dropped_are_not_alive(self):
        assert not any(node.alive for node in self.dropped)

    @invariant()
    def the_frontier_is_what_was_not_expanded_in_order(self):
        frontier = self.tree.frontier()
        assert sorted(map(id, frontier)) == sorted(
            id(node) for path, node in self.nodes.items() if not self.known[path].is_expanded
        )
        assert [n.open_reach for n in frontier] == sorted((n.open_reach for n in frontier), reverse=True)

    @invariant()
    def the_chain_goes_down_by_what_is_worth_most(self):
        path = ()
        for following in [*self.tree.chain(), None]:
            node = self.nodes[path]
            worths = {token: self.known[*path, token].worth for token in node.children}
            assert node.choice is following
            if following is None:
                assert all(worth < (0.0, False) for worth in worths.values())
            else:
                assert worths[following.token] == max(worths.values())
                path = (*path, following.token)


TestAgainstPaths = AgainstPaths.TestCase
TestAgainstPaths.settings = settings(max_examples=60, stateful_step_count=30)
