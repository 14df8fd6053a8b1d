"""The lookahead tree: the tokens that were drafted beyond the committed text.

The root is the last committed token. Every other node is a token that may come after its parent, and its `reach` is the
modelled probability that the committed text will pass through it. Running the draft model on a node *expands* it: the
model's choice comes after it, and its runners-up as *corrections*, in case the choice is rejected. Tokens that were
looked up in the text may come after a node without any model. A verdict moves the root along the committed tokens and
drops all other branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from protocol.errors import ProtocolError
from protocol.messages import Distribution
from protocol.randomness import further

# The rank of a guess that was looked up in the text.
LOOKED_UP = -1
# Stands for a token in the trail of a root that is drafted after anew; no token has this id.
_ANEW = 1 << 32


@attrs.frozen
class Guess:
    """A token that may come after a node.

    Attributes:
        token: its id.
        confidence: modelled probability, in [0, 1], that the committed text has the token there.
        probs: the distribution that it was drawn from, as in a `Proposal`; None under the match rule, for a correction,
            and for a token that was looked up.
        rank: 0 for the drafter's own choice; 1, 2, … for its runners-up, which are never proposed; `LOOKED_UP` for a
            token that was looked up.
        raw: the drafter's own confidence, before calibration, in [0, 1].
        staleness: how many hidden states of the drafter's own stood for the target's where the token was drafted; 0 for
            a drafter that reads none of the target's.
    """

    token: int
    confidence: float
    probs: Distribution | None = attrs.field(default=None, eq=False, repr=False)
    rank: int = 0
    raw: float = 0.0
    staleness: int = 0


class Node:
    """A token of the tree. The token and the distribution that it was drawn from never change.

    Attributes:
        guess: the drafted token; None at a root that was not drafted.
        token: its id.
        position: absolute position of the token in the text.
        trail: a hash of the text up to and including this token (see `protocol.randomness.further`); another one after
            each `LookaheadTree.drop_ahead`.
        parent: None at the root.
        children: by token.
        is_expanded: whether the draft model has been run on it.
        reach: modelled probability, in [0, 1], that the committed text passes through here.
        alive: False once a verdict has dropped it.
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
        """The node that would be proposed after this one: the drafter's own choice, or a likelier looked-up token.

        The decision between the two must not depend on which token was drawn. It does not: under the rejection rule
        the confidence of a draw is the same for every draw from its distribution.
        """
        best, best_confidence = None, -1.0
        for child in self.children.values():
            guess = child.guess
            if guess is not None and guess.rank <= 0 and guess.confidence > best_confidence:
                best, best_confidence = child, guess.confidence
        return best


class LookaheadTree:
    """The tokens that were drafted beyond the committed text of one session."""

    def __init__(self, last_token: int, position: int) -> None:
        """Make a tree of the root alone.

        Args:
            last_token: the last committed token.
            position: its absolute position.
        """
        self.root = Node(last_token, position, further(0, last_token), None, None)

    def expand(self, node: Node, *guesses: Guess) -> Node:
        """Put drafted tokens after a node, which the draft model has been run on.

        Returns: the node of the first guess.
        Raises: ProtocolError: the node was dropped, or one of the tokens was drafted after it before.
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
                known.guess = guess  # the same token was looked up, and the draft model is more confident
                self._rescale(known, node.reach * guess.confidence)
        node.is_expanded = True
        return node.children[guesses[0].token]

    def look_up(self, guesses: Sequence[Guess]) -> None:
        """Put a chain of looked-up tokens after the root, which has no other children yet."""
        node = self.root
        for guess in guesses:
            node = self._add(node, guess)

    def _add(self, node: Node, guess: Guess) -> Node:
        child = Node(guess.token, node.position + 1, further(node.trail, guess.token), node, guess)
        node.children[guess.token] = child
        return child

    def outcomes(self, tokens: Sequence[int]) -> Iterator[tuple[int, Guess, bool]]:
        """The guesses at committed tokens: (index of the token, guess, whether it was right)."""
        node: Node | None = self.root
        for index, token in enumerate(tokens):
            if node is None:
                return
            for child in node.children.values():
                if child.guess is not None:
                    yield index, child.guess, child.token == token
            node = node.children.get(token)

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move the root along committed tokens.

        Returns: True for a hit: the new root was in the tree, and keeps the nodes below it. False for a miss: the tree
            is the new root alone.
        Raises: ProtocolError: there are no tokens.
        """
        if not tokens:
            raise ProtocolError("the root moves by at least one token, got none")
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

    def drop_ahead(self) -> tuple[Guess, ...]:
        """Drop all nodes but the root, so that the drafter begins there anew, with other random numbers.

        With the same numbers, a token that is drawn anew would resemble the dropped one, and so depend on how long the
        drafter is busy with what it had begun to draft after that.

        Returns: the guesses at the token after the root.
        """
        guesses = tuple(child.guess for child in self.root.children.values() if child.guess is not None)
        for dropped in _below(self.root):
            dropped.alive = dropped is self.root
        self.root.children = {}
        self.root.is_expanded = False
        self.root.trail = further(self.root.trail, _ANEW)
        return guesses

    @property
    def has_draws(self) -> bool:
        """Whether there are tokens that were drawn from a distribution, be it on a branch that is unlikely."""
        return any(n.guess is not None and n.guess.probs is not None for n in _below(self.root) if n is not self.root)

    def chain(self) -> list[Node]:
        """The nodes that would be proposed, in order from the root on, root excluded."""
        path: list[Node] = []
        node = self.root.choice
        while node is not None:
            path.append(node)
            node = node.choice
        return path

    def frontier(self) -> list[Node]:
        """The nodes that the draft model has not been run on, likeliest first."""
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

    def is_stale(self, node: Node) -> bool:
        """Whether a node was drafted without hidden states of the target that have come since.

        The target has given the hidden states of all tokens up to the root. A drafter that had them used none of its
        own for the node after the root, and one more for each node beyond that one.
        """
        return node.guess is not None and node.guess.staleness >= max(1, self.depth(node))

    def _rescale(self, top: Node, reach: float) -> None:
        """Set a node's reach, and compute the reach of all nodes below it again."""
        top.reach = reach
        for node in _below(top):
            for child in node.children.values():
                assert child.guess is not None
                child.reach = node.reach * child.guess.confidence


def _below(node: Node) -> Iterator[Node]:
    """A node and all nodes below it, parents before children."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())
