"""Which tokens of two vocabularies are the same, and how the others are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

from protocol.errors import ProtocolError
from protocol.vocabulary_map import Tokenize, Vocabulary, VocabularyMap, map_vocabularies


def vocabulary(*pieces: bytes | str, **more: Any) -> Vocabulary:
    """Tokens in the order of their ids: bytes for pieces of text, names for special ones."""
    return Vocabulary(
        **{"size": len(pieces)} | more,
        pieces={id: piece for id, piece in enumerate(pieces) if isinstance(piece, bytes)},
        special={id: piece for id, piece in enumerate(pieces) if isinstance(piece, str)},
    )


def says_nothing(texts: Sequence[str]) -> list[list[int]]:
    """A tokenizer that knows no text."""
    return [[] for _ in texts]


def mapped(target: Vocabulary, draft: Vocabulary, tokenize: Tokenize = says_nothing) -> VocabularyMap:
    """The map, with the draft model's tokenizer."""
    return map_vocabularies(target, draft, says_nothing, tokenize)


def test_tokens_of_the_same_bytes_are_the_same() -> None:
    found = mapped(vocabulary(b"a", b"b", b" the"), vocabulary(b" the", b"c", b"a"))
    assert found.shared == {0: 2, 2: 0}
    assert found.readings[0] == (2,)
    assert found.readings[2] == (0,)
    assert found.described == "2 of the target's 3 tokens"


def test_of_several_tokens_of_the_same_bytes_one_is_proposed_and_all_are_read() -> None:
    found = mapped(vocabulary(b"a", b"b", b"a"), vocabulary(b"b", b"a", b"a"))
    assert found.shared == {0: 1, 1: 0}
    assert found.readings == ((1,), (0,), (1,))


def test_tokens_beyond_a_models_logits_are_left_out() -> None:
    target, draft = vocabulary(b"a", b"b", b"c", size=2), vocabulary(b"c", b"b", b"a", size=2)
    found = mapped(target, draft)
    assert found.shared == {1: 1}
    assert len(found.readings) == 2


def test_ids_without_a_token_are_read_as_the_unknown_one() -> None:
    target = vocabulary(b"a", size=3)
    assert mapped(target, vocabulary(b"a", "<unk>", unknown=1)).readings == ((0,), (1,), (1,))
    assert mapped(target, vocabulary(b"a", "</s>", ends=(1,))).readings == ((0,), (1,), (1,))
    assert mapped(target, vocabulary(b"a")).readings == ((0,), (0,), (0,))


# --- special tokens -------------------------------------------------------------------------------


def test_a_special_token_is_never_text_that_looks_like_it() -> None:
    target, draft = vocabulary("</s>", b"<x>", ends=(0,)), vocabulary(b"</s>", "<x>", "<end>", ends=(2,))
    found = mapped(target, draft)
    assert found.shared == {0: 2}  # by role, and not the text of that name
    assert found.readings[1] != (1,)


def test_what_ends_a_text_is_proposed_once_the_usual_one_first() -> None:
    target = vocabulary("<turn>", b"a", "<end>", ends=(2, 0))
    found = mapped(target, vocabulary(b"a", "</s>", ends=(1,)))
    assert found.shared == {1: 0, 2: 1}
    assert found.readings == ((1,), (0,), (1,))


def test_ends_of_the_same_name_are_the_same() -> None:
    target = vocabulary("<turn>", "<end>", ends=(1, 0))
    found = mapped(target, vocabulary("<end>", "<turn>", ends=(1, 0)))
    assert found.shared == {0: 1, 1: 0}


def test_a_name_with_another_role_is_not_the_same() -> None:
    target = vocabulary("<s>", b"a", "</s>", begin=0, ends=(2,))
    found = mapped(target, vocabulary("</s>", b"a", "<s>", begin=0, ends=(2,)))
    assert found.readings[2] == (2,)
    assert found.readings[0] == (0,)
    assert found.shared == {1: 1, 2: 2}


def test_other_special_tokens_are_read_by_name_and_never_proposed() -> None:
    target = vocabulary("<pad>", "<tool>", b"a")
    found = mapped(target, vocabulary(b"a", b"<", b">", b"to", b"l", b"o", "<pad>"))
    assert found.shared == {2: 0}
    assert found.readings == ((6,), (1, 3, 5, 4, 2), (0,))


def test_what_begins_a_text_is_read_as_what_begins_it_or_stands_between_texts() -> None:
    target = vocabulary("<s>", b"a", begin=0)
    begins = mapped(target, vocabulary(b"a", "<b>", "<e>", begin=1, ends=(2,)))
    assert begins.readings[0] == (1,)
    between = mapped(target, vocabulary(b"a", "<b>", "<e>", ends=(2,)))
    assert between.readings[0] == (2,)
    assert 0 not in begins.shared


def test_a_text_begins_as_the_draft_model_is_used_to() -> None:
    draft = vocabulary("<s>", b"a", begin=0, adds_begin=True)
    found = mapped(vocabulary("<b>", b"a", begin=0), draft)
    assert found.read(1, is_first=True) == (0, 1)
    assert found.read(1, is_first=False) == (1,)
    assert found.read(0, is_first=True) == (0,)


# --- text that no token of the draft model is ------------------------------------------------------


def test_other_tokens_are_spelled_as_the_draft_models_tokenizer_does() -> None:
    draft = vocabulary(b"ab", b"a", b"b", b"c", b"bc")
    assert mapped(vocabulary(b"abc"), draft).readings == ((0, 3),)
    assert mapped(vocabulary(b"abc"), draft, lambda texts: [[1, 4] for _ in texts]).readings == ((1, 4),)


@sweep("wrong", [[1], [1, 4, 3], [9], []])
def test_what_does_not_spell_the_text_is_not_used(wrong: list[int]) -> None:
    draft = vocabulary(b"ab", b"a", b"b", b"c", b"bc")
    assert mapped(vocabulary(b"abc"), draft, lambda texts: [wrong for _ in texts]).readings == ((0, 3),)


def test_a_tokenizer_that_puts_a_blank_in_front_is_asked_without_one() -> None:
    asked: list[str] = []

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return [[2, 3, 1] if text == "ab" else [2, 2, 3, 1] for text in texts]

    found = mapped(vocabulary(b" ab"), vocabulary(b" a", b"b", b" ", b"a"), tokenize)
    assert asked == [" ab", "ab"]
    assert found.readings == ((2, 3, 1),)


def test_text_that_nothing_spells_is_one_unknown_token() -> None:
    found = mapped(vocabulary(b"a??b"), vocabulary(b"a", b"b", "<unk>", unknown=2))
    assert found.readings == ((0, 2, 1),)


@sweep(
    ("shared", "readings", "beginnings", "says"),
    [
        ({}, ((),), {}, "at least one token"),
        ({0: 1, 1: 1}, ((1,), (1,)), {}, "the same token"),
        ({0: 1}, ((1,), (2,)), {3: 1}, "begins with a token that the draft model cannot propose"),
    ],
)
def test_a_map_that_cannot_be_is_refused(shared: Any, readings: Any, beginnings: Any, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        VocabularyMap(shared, readings, None, len(readings), beginnings)


# --- tokens that only the draft model has ---------------------------------------------------------


def test_a_longer_draft_token_stands_for_the_targets_first_token_of_it() -> None:
    target = vocabulary(b" quant", b"ization", b" quan", b"t", b"x")
    draft = vocabulary(b"t", b" quant", b" quantization", b" quan", b"y", b"xy")

    def tokenize(texts: Sequence[str]) -> list[list[int]]:
        return [{" quantization": [0, 1], "xy": [4, 9]}.get(text, []) for text in texts]

    found = map_vocabularies(target, draft, tokenize, says_nothing)
    assert found.shared == {0: 1, 2: 3, 3: 0}
    # The draft model cannot propose "x", and the target has nothing that "y" begins with.
    assert found.beginnings == {2: 0}


def test_without_the_targets_tokenizer_the_longest_beginning_is_taken_and_never_what_ends_texts() -> None:
    target, draft = vocabulary(b"a", b"ab", b"c", b"d"), vocabulary(b"abcd", b"a", b"ab", b"ca", b"c", b"c")
    assert mapped(target, draft).beginnings == {0: 1, 3: 2, 5: 2}
    target, draft = vocabulary("<e>", b"a", ends=(0,)), vocabulary("<e>", b"a", b"?", b"??a", ends=(0,))
    assert mapped(target, draft).beginnings == {}


pieces = st.lists(st.binary(min_size=1, max_size=5), max_size=30)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(pieces, pieces, st.data())
def test_a_text_is_spelled_with_the_same_bytes(ours: list[bytes], theirs: list[bytes], data: st.DataObject) -> None:
    target = vocabulary(*ours, b"x")
    draft = vocabulary(*theirs, *(bytes([byte]) for byte in range(256)))
    found = mapped(target, draft)
    text = data.draw(st.lists(st.sampled_from(range(len(ours) + 1))))
    own = [id for i, token in enumerate(text) for id in found.read(token, is_first=i == 0)]
    assert b"".join(draft.pieces[id] for id in own) == b"".join(target.pieces[token] for token in text)
    assert all(target.pieces[token] == draft.pieces[own] for token, own in found.shared.items())
