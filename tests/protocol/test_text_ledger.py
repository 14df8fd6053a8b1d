"""The ledger of texts that ranks compare."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.text_ledger import TextLedger

TOKENS = st.lists(st.integers(0, 200_000), max_size=12)


def ledger_of(tokens: list[int]) -> TextLedger:
    ledger = TextLedger()
    ledger.open(7)
    ledger.feed(7, tokens)
    return ledger


@given(TOKENS, TOKENS, TOKENS)
def test_an_entry_depends_on_the_tokens_and_not_on_the_way_there(kept, dropped, more):
    ledger = ledger_of(kept)
    ledger.feed(7, dropped)
    ledger.cut(7, len(kept))
    for token in more:
        ledger.feed_later(7, mx.array([token]))
    assert ledger.entry(7) == ledger_of(kept + more).entry(7)


@given(TOKENS, TOKENS)
def test_different_texts_have_different_entries(one, other):
    assert (ledger_of(one).entry(7) == ledger_of(other).entry(7)) == (one == other)


def test_a_token_that_is_still_computed_can_be_cut():
    ledger = ledger_of([1, 2])
    ledger.feed_later(7, mx.array([3]))
    ledger.cut(7, 1)
    assert ledger.entry(7) == ledger_of([1]).entry(7)


def test_closed_texts_are_forgotten():
    ledger = ledger_of([1])
    ledger.close(7)
    with pytest.raises(KeyError):
        ledger.entry(7)
