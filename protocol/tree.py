"""The lookahead tree: what has been drafted ahead of the committed text.

The root is the last committed token. A node is a token after its parent; `reach` is the modelled
probability that the committed text will pass through it. Running the draft model on a node *expands* it: its own
choice comes after it, and the runners-up as *corrections*, in case the choice falls. A verdict moves the root
along what was committed, and what hangs off other branches is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import mlx.core as mx

from protocol.errors import ProtocolError
from protocol.randomness import further


@attrs.frozen
class Guess:
    """A token that may come after a node.

    Attributes:
        token: its id.
        confidence: modelled probability, in [0, 1], that the committed text has it there.
        probs: (W,) the distribution that it was drawn from, evaluated; None under the match rule, for a correction,
            and for a token that was looked up and not drawn.
        rank: 0 for the drafter's own choice, which may be proposed; 1, 2, … for its runners-up.
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
        children: by token; none until the node is expanded.
        reach: modelled probability, in [0, 1], that the committed text passes through here.
        alive: False once a verdict has gone another way.
    """

    __slots__ = ("alive", "children", "guess", "parent", "position", "reach", "token", "trail")

    def __init__(self, token: int, position: int, trail: int, parent: Node | None, guess: Guess | None) -> None:
        self.token = token
        self.position = position
        self.trail = trail
        self.parent = parent
        self.guess = guess
        self.children: dict[int, Node] = {}
        self.reach: float = parent.reach * guess.confidence if parent and guess else 1.0
        self.alive = True

    def __repr__(self) -> str:
        return f"Node(token={self.token}, position={self.position}, reach={self.reach:.3g})"

    @property
    def choice(self) -> Node | None:
        """The drafter's own choice after this; None until it is expanded."""
        return next((child for child in self.children.values() if child.guess and child.guess.rank == 0), None)


class LookaheadTree:
    """What is drafted beyond the committed text of one session."""

    def __init__(self, last_token: int, position: int) -> None:
        """A tree of its root alone: the last committed token, and its absolute position."""
        self.root = Node(last_token, position, further(0, last_token), None, None)

    def expand(self, node: Node, *guesses: Guess) -> Node:
        """Put drafted tokens after a node.

        Returns: the node of the first of them.
        Raises: ProtocolError: the node was dropped, or has one of these tokens already.
        """
        if not node.alive:
            raise ProtocolError(f"{node!r} is no longer in the tree")
        for guess in guesses:
            if guess.token in node.children:
                raise ProtocolError(f"{node!r} already has token {guess.token} after it")
            trail = further(node.trail, guess.token)
            node.children[guess.token] = Node(guess.token, node.position + 1, trail, node, guess)
        return node.children[guesses[0].token]

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
            self._rescale(node)
        for dropped in _below(old):
            dropped.alive = False
        self.root.parent = None
        return node is not None

    def chain(self) -> list[Node]:
        """The drafter's own choices, one after the other from the root on, root excluded."""
        path: list[Node] = []
        node = self.root.choice
        while node is not None:
            path.append(node)
            node = node.choice
        return path

    def frontier(self) -> list[Node]:
        """Nodes with nothing drafted after them, likeliest first."""
        return sorted((n for n in _below(self.root) if not n.children), key=lambda n: -n.reach)

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

    def _rescale(self, root: Node) -> None:
        """Reach anew from a root that is committed by now."""
        root.reach = 1.0
        for node in _below(root):
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
