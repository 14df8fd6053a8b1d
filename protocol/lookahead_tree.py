"""The lookahead tree: what has been drafted ahead of the committed text.

The root is the last committed token. A node is a token after its parent; `reach` is the modelled
probability that the committed text will pass through it. Running the draft model on a node *expands* it: its own
choice comes after it, and the runners-up as *corrections*, in case the choice falls. What was looked up in the text
may come after a node without any model. A verdict moves the root along what was committed, and what hangs off other
branches is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import mlx.core as mx

from protocol.errors import ProtocolError
from protocol.randomness import further

LOOKED_UP = -1


@attrs.frozen
class Guess:
    """A token that may come after a node.

    Attributes:
        token: its id.
        confidence: modelled probability, in [0, 1], that the committed text has it there.
        probs: (W,) the distribution that it was drawn from, evaluated; None under the match rule, for a correction,
            and for a token that was looked up and not drawn.
        rank: 0 for the drafter's own choice; 1, 2, … for its runners-up, which are never proposed; `LOOKED_UP` for
            what came here earlier in the text.
        raw: the drafter's own confidence, before calibration, in [0, 1].
    """

    token: int
    confidence: float
    probs: mx.array | None = attrs.field(default=None, eq=False, repr=False)
    rank: int = 0
    raw: float = 0.0


class Node:
    """A token of the tree. Its token and distribution never change: see `protocol.randomness`.

    Attributes:
        guess: the drafted token; None at a root that was not drafted.
        token: its id.
        position: absolute position of the token in the text.
        trail: of the text up to here; see `protocol.randomness.further`.
        parent: None at the root.
        children: by token.
        is_expanded: whether the draft model has been run on it.
        reach: modelled probability, in [0, 1], that the committed text passes through here.
        alive: False once a verdict has gone another way.
    """

    __slots__ = ("alive", "children", "guess", "is_expanded", "parent", "position", "reach", "token", "trail")

    def __init__(self, token: int, position: int, trail: int, parent: Node | None, guess: Guess | None) -> None:
        self.token = token
        self.position = position
        self.trail = trail
        self.parent = parent
        self.guess = guess
        self.children: dict[int, Node] = {}
        self.is_expanded = False
        self.reach: float = parent.reach * guess.confidence if parent and guess else 1.0
        self.alive = True

    def __repr__(self) -> str:
        return f"Node(token={self.token}, position={self.position}, reach={self.reach:.3g})"

    @property
    def choice(self) -> Node | None:
        """What would be proposed after this: the drafter's own choice, or what was looked up if that is likelier.

        Which of the two may not hang on the token that was drawn, and does not: under the rejection rule the
        confidence of a draw is that of any draw from its distribution.
        """
        eligible = [child for child in self.children.values() if child.guess is not None and child.guess.rank <= 0]
        return max(eligible, key=lambda child: child.guess.confidence if child.guess else 0.0, default=None)


class LookaheadTree:
    """What is drafted beyond the committed text of one session."""

    def __init__(self, last_token: int, position: int) -> None:
        """A tree of its root alone: the last committed token, and its absolute position."""
        self.root = Node(last_token, position, further(0, last_token), None, None)

    def expand(self, node: Node, *guesses: Guess) -> Node:
        """Put drafted tokens after a node.

        Returns: the node of the first of them.
        Raises: ProtocolError: the node was dropped, or one of these tokens was drafted after it before.
        """
        if not node.alive:
            raise ProtocolError(f"{node!r} is no longer in the tree")
        for guess in guesses:
            known = node.children.get(guess.token)
            if known is not None and (known.guess is None or known.guess.rank != LOOKED_UP):
                raise ProtocolError(f"{node!r} already has token {guess.token} after it")
        for guess in guesses:
            known = node.children.get(guess.token)
            if known is None:
                self._add(node, guess)
            elif guess.rank == 0 and known.guess is not None and guess.confidence > known.guess.confidence:
                known.guess = guess  # the same token, and the likelier way to have come by it
                self._rescale(known, node.reach * guess.confidence)
        node.is_expanded = True
        return node.children[guesses[0].token]

    def look_up(self, guesses: Sequence[Guess]) -> None:
        """Put a chain of tokens that were looked up after the root, of which nothing else is known yet."""
        node = self.root
        for guess in guesses:
            node = self._add(node, guess)

    def _add(self, node: Node, guess: Guess) -> Node:
        child = Node(guess.token, node.position + 1, further(node.trail, guess.token), node, guess)
        node.children[guess.token] = child
        return child

    def outcomes(self, tokens: Sequence[int]) -> Iterator[tuple[int, Guess, bool]]:
        """What was guessed along tokens that were committed: (index of the token, guess, whether it was right)."""
        node: Node | None = self.root
        for index, token in enumerate(tokens):
            if node is None:
                return
            for child in node.children.values():
                if child.guess is not None:
                    yield index, child.guess, child.token == token
            node = node.children.get(token)

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move the root along tokens that were committed.

        Returns: True for a hit: the new root was in the tree, with whatever hangs below it.
            False for a miss: the tree is its new root alone.
        Raises: ProtocolError: there are no tokens.
        """
        if not tokens:
            raise ProtocolError("a verdict moves the root by one token at least")
        old, trail = self.root, self.root.trail
        node: Node | None = old
        for token in tokens:
            node = node.children.get(token) if node else None
            trail = further(trail, token)
        if node is None:
            self.root = Node(tokens[-1], old.position + len(tokens), trail, None, None)
        else:
            assert node.parent is not None
            del node.parent.children[node.token]
            self.root = node
            self._rescale(node, 1.0)
        for dropped in _below(old):
            dropped.alive = False
        self.root.parent = None
        return node is not None

    def chain(self) -> list[Node]:
        """What would be proposed, one token after the other from the root on, root excluded."""
        path: list[Node] = []
        node = self.root.choice
        while node is not None:
            path.append(node)
            node = node.choice
        return path

    def frontier(self) -> list[Node]:
        """Nodes that the draft model has not been run on, likeliest first."""
        return sorted((n for n in _below(self.root) if not n.is_expanded), key=lambda n: -n.reach)

    def path(self, node: Node) -> list[int]:
        """The tokens from the root, excluded, to a node, included; empty for the root."""
        tokens = []
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]

    def depth(self, node: Node) -> int:
        """How many tokens a node lies beyond the root; 0 for the root."""
        return node.position - self.root.position

    def _rescale(self, top: Node, reach: float) -> None:
        """Reach anew from a node that has become likelier."""
        top.reach = reach
        for node in _below(top):
            for child in node.children.values():
                assert child.guess is not None
                child.reach = node.reach * child.guess.confidence


def _below(node: Node) -> Iterator[Node]:
    """A node and all beneath it, parents before children."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())
