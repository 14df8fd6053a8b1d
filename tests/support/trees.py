"""Lookahead trees and views of them, built from a few numbers."""

from typing import Any

from protocol.lookahead_policy import PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node

ROOT, POSITION = 100, 9


Path = tuple[tuple[int, float], ...]


def drafted_tree(*guesses: Guess) -> LookaheadTree:
    """A tree with a chain of guesses."""
    tree = LookaheadTree(ROOT, POSITION)
    node = tree.root
    for guess in guesses:
        node = tree.expand(node, guess)
    return tree


def tree_of(drafted: Path = (), copied: Path = ()) -> LookaheadTree:
    """A tree with a drafted and a copied chain of (token, confidence)."""
    tree = drafted_tree(*(Guess(token, confidence, raw=confidence) for token, confidence in drafted))
    tree.copy([Guess(token, confidence, raw=confidence, copy_kind=0) for token, confidence in copied])
    return tree


def chain_of(length: int, confidence: float = 0.5) -> LookaheadTree:
    return tree_of(tuple((i, confidence) for i in range(length)))


def at(tree: LookaheadTree, *path: int) -> Node:
    node = tree.root
    for token in path:
        node = node.children[token]
    return node


def view_of(tree: LookaheadTree, **changes: Any) -> PolicyView:
    defaults = {
        "max_proposal": 10,
        "max_depth": 100,
        "can_expand": lambda _: True,
        "num_to_feed": lambda _: 1,
        "now_s": 0.0,
    }
    return PolicyView(tree, **defaults | changes)
