"""The lookahead tree: the tokens that were drafted beyond the committed text.

The root is the last committed token. Running the draft model on a node *expands* it: the model's choice comes after it.
Copied tokens need no model. A verdict moves the root along the committed tokens and drops all other branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from protocol.copying import DraftedBy, drafter_of_kind
from protocol.errors import ProtocolError
from protocol.messages import Distribution, Withdraw
from protocol.randomness import further


@attrs.frozen
class Guess:
    """A token that may come after a node."""

    token: int
    confidence: float  # modelled probability, in [0, 1], that the committed text has the token there
    # The distribution that it was drawn from, as in a `Proposal`; None if it was not drawn.
    probs: Distribution | None = attrs.field(default=None, eq=False, repr=False)
    copy_kind: int | None = None  # if copied or forced, see `protocol.copying`; None if a model drafted it
    raw: float = 0.0  # the drafter's own confidence, before calibration, in [0, 1]
    # How many hidden states of the drafter's own stood for the target's where it was drafted; 0 if it reads none.
    staleness: int = 0
    # Tokens to expect of a proposal from this one on, itself included. If the token was drawn, it must not depend on
    # which one was drawn, nor on what was drafted after it.
    worth: float = attrs.Factory(lambda guess: guess.confidence, takes_self=True)

    @property
    def is_copied(self) -> bool:
        """Whether the token was copied, or forced, and no model has drafted it."""
        return self.copy_kind is not None

    @property
    def drafter(self) -> DraftedBy:
        """Who has drafted it."""
        return drafter_of_kind(self.copy_kind)


@attrs.define(eq=False, repr=False)
class Node:
    """A token of the tree. The token and the distribution that it was drawn from never change."""

    token: int
    position: int  # absolute position of the token in the text
    trail: int  # a hash of the text up to and including this token; see `protocol.randomness.further`
    parent: Node | None
    guess: Guess | None = None  # the drafter's; None if only copied, and at a root that was not drafted
    copy: Guess | None = None  # the guess of the copy; None if the token was not copied
    children: dict[int, Node] = attrs.field(factory=dict)  # by token
    is_expanded: bool = False  # whether the draft model has been run on it
    reach: float = 1.0  # modelled probability, in [0, 1], that the committed text passes through here
    alive: bool = True  # False once a verdict has dropped it

    def __repr__(self) -> str:
        return f"Node(token={self.token}, position={self.position}, reach={self.reach:.3g})"

    @property
    def best(self) -> Guess | None:
        """What the token would be proposed as: the drafter's guess or the copy, whichever is worth more, also if they
        are one token. A draw and a copy are judged differently: preferring one as they coincide would bias the text.
        """
        guess, copy = self.guess, self.copy
        return guess if copy is None or (guess is not None and guess.worth >= copy.worth) else copy

    @property
    def choice(self) -> Node | None:
        """The node to propose after this one, drawn or copied, by a worth that is the same for every draw."""
        choice, most = None, (-1.0, False)
        for child in self.children.values():
            best = child.best
            if best is not None and (worth := (best.worth, not best.is_copied)) > most:
                choice, most = child, worth
        return choice

    @property
    def open_reach(self) -> float:
        """The reach of a node that is not expanded, less that of what was copied after it, in [0, 1]."""
        return max(0.0, self.reach - sum([child.reach for child in self.children.values()]))


class LookaheadTree:
    """The tokens that were drafted beyond the committed text of one session: at first, its last token alone."""

    def __init__(self, last_token: int, position: int) -> None:
        self.root = Node(last_token, position, further(0, last_token), None)

    def expand(self, node: Node, guess: Guess) -> Node:
        """Put a drafted token after a node, and give its node. Raises: ProtocolError: the node is gone or expanded."""
        if not node.alive:
            raise ProtocolError(f"{node!r} is no longer in the tree")
        if node.is_expanded:
            raise ProtocolError(f"{node!r} already has a drafted token after it, and got {guess.token}")
        child = self._child(node, guess.token)
        child.guess = guess
        node.is_expanded = True
        self._rescale(child)
        return child

    def copy(self, guesses: Sequence[Guess], after: Node | None = None) -> None:
        """Replace the chain of copied tokens after a node, by default the root. What was drafted stays."""
        top = after or self.root
        for node in reversed(list(_copied_below(top))):
            node.copy = None
            if node.parent is not None and node.guess is None and not (node.children or node.is_expanded):
                del node.parent.children[node.token]
                node.alive = False
        node = top
        for guess in guesses:
            node = self._child(node, guess.token)
            node.copy = guess
        self._rescale(top)

    def _child(self, node: Node, token: int) -> Node:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = Node(token, node.position + 1, further(node.trail, token), node)
        return child

    def outcomes(self, tokens: Sequence[int]) -> Iterator[tuple[int, Guess, bool]]:
        """The drafter's guesses at committed tokens: (index of the token, guess, whether it was right)."""
        node: Node | None = self.root
        for index, token in enumerate(tokens):
            if node is None:
                return
            for child in node.children.values():
                if child.guess is not None:
                    yield index, child.guess, child.token == token
            node = node.children.get(token)

    def advance(self, tokens: Sequence[int]) -> bool:
        """Move the root along committed tokens, at least one (else a ProtocolError). True for a hit."""
        if not tokens:
            raise ProtocolError("the root moves by at least one token, got none")
        old, trail = self.root, self.root.trail
        node: Node | None = old
        for token in tokens:
            node = node.children.get(token) if node else None
            trail = further(trail, token) if node is None else node.trail
        if node is None:
            self.root = Node(tokens[-1], old.position + len(tokens), trail, None)
        else:
            assert node.parent is not None
            del node.parent.children[node.token]
            self.root = node
            node.parent = None
            self._rescale(node)
        for dropped in _below(old):
            dropped.alive = False
        return node is not None

    @property
    def has_draws(self) -> bool:
        """Whether there are tokens that were drawn from a distribution, even on an unlikely branch."""
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
        """The nodes that the draft model has not been run on, those first that most likely need it."""
        return sorted((n for n in _below(self.root) if not n.is_expanded), key=lambda n: -n.open_reach)

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
        """Whether a node was drafted without hidden states of the target, given up to the root, that came since."""
        best = node.best
        return best is not None and best.staleness >= max(1, self.depth(node))

    def _rescale(self, top: Node) -> None:
        for node in _below(top):
            if node.parent is None:
                node.reach = 1.0
            else:
                # A node whose copy was withdrawn stays only for its drafted children, and is not expected itself.
                node.reach = node.parent.reach * (best.confidence if (best := node.best) is not None else 0.0)


def withdrawal(session: int, tree: LookaheadTree | None, *, at_once: bool = False) -> Withdraw | None:
    """The message by which a drafter leaves a session; None as long as it must stay.

    Unless the rule is match, a text is exact only if the decision to propose a token does not depend on which token was
    drawn. But a drafter may fail because of a token that it drew. If it left without proposing it, that token would be
    rarer in texts. So it draws no new tokens, but proposes and rests as before until verdicts have consumed those that
    it drew.

    Args:
        tree: what was drafted for it; None for a drafter in another process, whose loss does not depend on what was
            drawn.
        at_once: whether all that was drawn is dropped, for a reason that is independent of which tokens were drawn; if
            it is the drafter's turn, it must have proposed first, as a chain that ends the text is proposed earlier.
    """
    return None if tree is not None and tree.has_draws and not at_once else Withdraw(session)


def _copied_below(node: Node) -> Iterator[Node]:
    while (following := next((child for child in node.children.values() if child.copy is not None), None)) is not None:
        yield following
        node = following


def _below(node: Node) -> Iterator[Node]:
    """A node and all nodes below it, parents before children."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(node.children.values())
