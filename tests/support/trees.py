"""Lookahead trees and views of them, built from a few numbers."""

from __future__ import annotations

from typing import Any

from protocol.lookahead_policy import PolicyView
from protocol.lookahead_tree import Guess, LookaheadTree, Node

ROOT, POSITION = 100, 9


def tree_of(*paths: tuple[tuple[int, float], ...]) -> LookaheadTree:
    """A tree with these paths of (token, confidence). The first child drafted at a node is its choice."""
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


def view_of(tree: LookaheadTree, **changes: Any) -> PolicyView:
    defaults = {
        "max_proposal": 10,
        "max_depth": 100,
        "can_expand": lambda _: True,
        "num_to_feed": lambda _: 1,
        "now_s": 0.0,
    }
    return PolicyView(tree, **defaults | changes)
