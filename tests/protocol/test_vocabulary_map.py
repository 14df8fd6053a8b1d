"""Which tokens of two vocabularies are the same, and how the others are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

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


@sweep(
    ("target", "draft", "shared", "readings"),
    [
        # Tokens of the same bytes are the same.
        (vocabulary(b"a", b"b", b" the"), vocabulary(b" the", b"c", b"a"), {0: 2, 2: 0}, ((2,), (0,), (0,))),
        # Of several tokens of the same bytes, one is proposed and all are read.
        (vocabulary(b"a", b"b", b"a"), vocabulary(b"b", b"a", b"a"), {0: 1, 1: 0}, ((1,), (0,), (1,))),
        # Tokens beyond a model's logits are left out.
        (vocabulary(b"a", b"b", b"c", size=2), vocabulary(b"c", b"b", b"a", size=2), {1: 1}, ((0,), (1,))),
        # Ids without a token are read as the unknown one, else as what ends a text, else as the first.
        (vocabulary(b"a", size=3), vocabulary(b"a", "<unk>", unknown=1), {0: 0}, ((0,), (1,), (1,))),
        (vocabulary(b"a", size=3), vocabulary(b"a", "</s>", ends=(1,)), {0: 0}, ((0,), (1,), (1,))),
        (vocabulary(b"a", size=3), vocabulary(b"a"), {0: 0}, ((0,), (0,), (0,))),
        # Text that nothing spells is one unknown token.
        (vocabulary(b"a??b"), vocabulary(b"a", b"b", "<unk>", unknown=2), {}, ((0, 2, 1),)),
        # Special tokens are the same by role, and not what looks like them in a text.
        (
            vocabulary("</s>", b"<x>", ends=(0,)),
            vocabulary(b"</s>", "<x>", "<end>", ends=(2,)),
            {0: 2},
            ((2,), (2,)),
        ),
        # What ends a text is proposed once, the usual one first.
        (
            vocabulary("<turn>", b"a", "<end>", ends=(2, 0)),
            vocabulary(b"a", "</s>", ends=(1,)),
            {1: 0, 2: 1},
            ((1,), (0,), (1,)),
        ),
        # Ends of the same name are the same; a name with another role is not.
        (
            vocabulary("<turn>", "<end>", ends=(1, 0)),
            vocabulary("<end>", "<turn>", ends=(1, 0)),
            {0: 1, 1: 0},
            ((1,), (0,)),
        ),
        (
            vocabulary("<s>", b"a", "</s>", begin=0, ends=(2,)),
            vocabulary("</s>", b"a", "<s>", begin=0, ends=(2,)),
            {1: 1, 2: 2},
            ((0,), (1,), (2,)),
        ),
        # Others are read by name, or as the text of it, and never proposed.
        (
            vocabulary("<pad>", "<tool>", b"a"),
            vocabulary(b"a", b"<", b">", b"to", b"l", b"o", "<pad>"),
            {2: 0},
            ((6,), (1, 3, 5, 4, 2), (0,)),
        ),
        # What begins a text is read as what begins it, or stands between texts.
        (
            vocabulary("<s>", b"a", begin=0),
            vocabulary(b"a", "<b>", "<e>", begin=1, ends=(2,)),
            {1: 0},
            ((1,), (0,)),
        ),
        (vocabulary("<s>", b"a", begin=0), vocabulary(b"a", "<b>", "<e>", ends=(2,)), {1: 0}, ((2,), (0,))),
    ],
)
def test_tokens_are_the_same_by_bytes_or_role_and_the_others_are_read(target, draft, shared, readings) -> None:
    found = mapped(target, draft)
    assert (found.shared, found.readings) == (shared, readings)


def test_a_map_says_how_many_tokens_are_the_same() -> None:
    found = mapped(vocabulary(b"a", b"b", b" the"), vocabulary(b" the", b"c", b"a"))
    assert found.described == "2 of the target's 3 tokens"


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


@settings(max_examples=100)
@given(pieces, pieces, st.data())
def test_a_text_is_spelled_with_the_same_bytes(ours: list[bytes], theirs: list[bytes], data: st.DataObject) -> None:
    target = vocabulary(*ours, b"x")
    draft = vocabulary(*theirs, *(bytes([byte]) for byte in range(256)))
    found = mapped(target, draft)
    text = data.draw(st.lists(st.sampled_from(range(len(ours) + 1))))
    own = [id for i, token in enumerate(text) for id in found.read(token, is_first=i == 0)]
    assert b"".join(draft.pieces[id] for id in own) == b"".join(target.pieces[token] for token in text)
    assert all(target.pieces[token] == draft.pieces[own] for token, own in found.shared.items())
    assert len(set(found.shared.values())) == len(found.shared)
    assert all(found.readings)
    assert set(found.beginnings.values()) <= found.shared.keys()
