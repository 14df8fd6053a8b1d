"""A drafter leaves a session once nothing is left that it has drawn."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import pytest
from trees import POSITION, ROOT, drafted_tree

import protocol
from protocol.lookahead_tree import Guess, LookaheadTree, withdrawal
from protocol.messages import Withdraw

SESSION = 3


def drawn(token: int) -> Guess:
    return Guess(token, 0.5, mx.array([0.5, 0.5]))


@pytest.mark.parametrize(
    "guesses", [(), (Guess(1, 0.5), Guess(2, 0.5)), (Guess(1, 0.5, copy_kind=0),)], ids=["nothing", "match", "text"]
)
def test_a_drafter_that_has_drawn_nothing_may_leave(guesses: tuple[Guess, ...]) -> None:
    assert withdrawal(SESSION, drafted_tree(*guesses)) == Withdraw(SESSION)


def test_a_drafter_leaves_once_verdicts_have_dropped_what_it_has_drawn() -> None:
    tree = drafted_tree(drawn(1), drawn(2))
    for token in (1, 2):
        assert withdrawal(SESSION, tree) is None
        tree.advance([token])
    assert withdrawal(SESSION, tree) == Withdraw(SESSION)


def test_a_drafter_stays_for_what_it_has_drawn_after_a_copy() -> None:
    tree = LookaheadTree(ROOT, POSITION)
    tree.expand(tree.root, drawn(1))
    tree.copy([Guess(2, 0.1, copy_kind=0)])
    tree.expand(tree.root.children[2], drawn(5))
    tree.advance([2])
    assert withdrawal(SESSION, tree) is None
    tree.advance([6])
    assert withdrawal(SESSION, tree) == Withdraw(SESSION)


def test_a_drafter_that_leaves_for_another_reason_leaves_at_once() -> None:
    assert withdrawal(SESSION, drafted_tree(drawn(1)), at_once=True) == Withdraw(SESSION)


def test_no_other_code_makes_a_withdrawal() -> None:
    root = Path(protocol.__file__).parents[1]
    sources = [path for package in ("protocol", "actors", "runtime") for path in (root / package).rglob("*.py")]
    assert len(sources) > 100
    makes = re.compile(r"(?<!class )(?<!case )\bWithdraw\(")
    assert [path.name for path in sources if makes.search(path.read_text("utf-8"))] == ["lookahead_tree.py"]
