"""Tokenizers of a target and a draft model: whether they are the same, and texts of the one read in the other."""

import functools
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from other_vocabularies import byte_level, own_texts, sentencepiece
from sample_tokenizers import SCRIPTS, WORDS, byte_fallback, demo
from sample_tokenizers import byte_level as parts_of_characters
from sweeps import sweep
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import runtime
from protocol.vocabulary_map import Vocabulary, VocabularyMap
from runtime.loading.tokenizers import vocabulary, vocabulary_map

TOKENIZERS = {
    "demo": lambda: demo(),
    "byte-level": lambda: byte_level(2500).tokenizer,
    "SentencePiece": lambda: sentencepiece().tokenizer,
}
PAIRS = [(ours, theirs) for ours in TOKENIZERS for theirs in TOKENIZERS if ours != theirs]
NAMES = ("<|endoftext|>", "<s>", "</s>", "<unk>")


@functools.cache
def mapped(ours: str, theirs: str) -> tuple[VocabularyMap, Vocabulary]:
    """How the tokens of one are read in the other, and the other."""
    target, draft = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    found, own = vocabulary_map(target, len(target), draft, len(draft)), vocabulary(draft, len(draft))
    return found, own


def check_reading(ours: str, theirs: str, text: str) -> None:
    """Check that a text is spelled with the same bytes, and decoded to the same text."""
    found, own = mapped(ours, theirs)
    read = own_texts(found, TOKENIZERS[ours]().encode(text, add_special_tokens=False))
    spelled = b"".join(own.pieces.get(id, b"") for id in read)
    # SentencePiece puts a blank in front of each text.
    assert spelled.removeprefix(b" " if ours == "SentencePiece" and text else b"") == text.encode()
    decoded = TOKENIZERS[theirs]().decode(read, skip_special_tokens=True)
    blanks = (" " if ours == "SentencePiece" and text else "") + text
    assert decoded == (blanks.removeprefix(" ") if theirs == "SentencePiece" else blanks)


@sweep(("ours", "theirs"), PAIRS)
@sweep("text", SCRIPTS)
def test_texts_in_every_script_stay_what_they_are(ours: str, theirs: str, text: str) -> None:
    check_reading(ours, theirs, text)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@settings(max_examples=60)
@given(text=st.text())
def test_any_text_stays_what_it_is(ours: str, theirs: str, text: str) -> None:
    assume(not any(name in text for name in NAMES))
    check_reading(ours, theirs, text)


def test_a_blank_and_a_byte_are_the_same_however_they_are_written() -> None:
    found, _ = mapped("demo", "SentencePiece")
    ours, theirs = demo().get_vocab(), sentencepiece().tokenizer.get_vocab()
    assert found.shared[ours["Ġself"]] == theirs["▁self"]
    assert found.shared[ours["Ċ"]] == theirs["\n"]  # and not <0x0A>
    (half,) = {token for token in ours if token == "ð"}
    assert found.shared[ours[half]] == theirs["<0xF0>"]
    assert found.shared[ours["<|endoftext|>"]] == theirs["</s>"]
    assert {theirs["<unk>"], theirs["<s>"]}.isdisjoint(found.shared.values())
    assert found.begin == theirs["<s>"]


def test_what_a_smaller_vocabulary_lacks_is_spelled_by_its_merges() -> None:
    found, _ = mapped("demo", "byte-level")
    smaller = byte_level(2500).tokenizer
    lacking = [token for token in range(4096) if token not in found.shared]
    assert len(lacking) == 4096 - 2500
    for token in lacking[:200]:
        text = demo().decode([token])
        if "\ufffd" not in text:
            assert list(found.readings[token]) == smaller.encode(text, add_special_tokens=False)


def test_the_same_vocabulary_needs_no_map() -> None:
    assert vocabulary_map(demo(), 4096, demo(), 4096) is None


def test_parts_of_characters_are_the_bytes_that_they_are() -> None:
    tokenizer = parts_of_characters()
    found = vocabulary(tokenizer, len(tokenizer))
    assert found.pieces[tokenizer.get_vocab()["ðŁ"]] == b"\xf0\x9f"
    assert found.special == {}
    fallback = byte_fallback()
    found = vocabulary(fallback, len(fallback))
    assert found.pieces[fallback.get_vocab()[WORDS[0]]] == b" the"
    assert found.pieces[fallback.get_vocab()["<0xF0>"]] == b"\xf0"
    assert found.ends == (fallback.eos_token_id,)


def words(*names: str, decoder: Any = None) -> TokenizerWrapper:
    """A tokenizer of some words."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize(
    ("ours", "theirs", "whose"),
    [(words("a", "b"), demo(), "target"), (demo(), words("a", "b", decoder=decoders.WordPiece()), "draft model")],
)
def test_a_tokenizer_that_does_not_tell_its_bytes_is_refused(ours: Any, theirs: Any, whose: str) -> None:
    with pytest.raises(runtime.VocabularyMismatchError) as refusal:
        vocabulary_map(ours, len(ours), theirs, len(theirs))
    assert f"the {whose}'s tokenizer does not tell the bytes of its tokens" in str(refusal.value)
    assert "use a draft model with the target's tokenizer" in str(refusal.value)


def test_vocabularies_without_a_common_token_are_refused() -> None:
    ours, theirs = (words(*names, decoder=decoders.ByteLevel()) for names in ("ab", "cd"))
    with pytest.raises(runtime.VocabularyMismatchError, match="and no token is in both; use a draft model with the"):
        vocabulary_map(ours, 2, theirs, 2)


def test_blanks_may_be_written_by_a_metaspace() -> None:
    found = vocabulary(words("_the", "cat", decoder=decoders.Metaspace(replacement="_")), 2)
    assert found.pieces == {0: b" the", 1: b"cat"}
