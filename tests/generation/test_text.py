"""Text arrives in pieces that add up to the tokenizer's decoding of the whole."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from sample_tokenizers import EMOJI_BYTES, WORDS, Bytes, DecodeOnly, byte_fallback, demo
from sweeps import sweep
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from protocol.errors import PromptTooLongError
from runtime.generation.text import Detokenizer, encode_prompt


def byte_fallback_ids(*tokens: str) -> list[int]:
    vocabulary = byte_fallback().get_vocab()
    return [vocabulary[token] for token in tokens]


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The piece of each token, and the final one."""
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token) for token in ids] + [detokenizer.finish()]


# --- what follows a prompt ------------------------------------------------------------------------


def test_the_text_behind_a_prompt_has_the_first_space_that_it_has_in_the_whole():
    """ggml-org/llama.cpp #2310: SentencePiece's decoders drop the space at the start of a text."""
    the, cat, sat, end = byte_fallback_ids("▁the", "▁cat", "▁sat", "</s>")
    inner = copy.deepcopy(byte_fallback()._tokenizer)
    inner.chat_template = "{% for m in messages %}sat{% endfor %}{% if add_generation_prompt %} the{% endif %}"
    chat = TokenizerWrapper(inner)
    for tokenizer, prompt, text in (
        (byte_fallback(), [the, cat], " sat"),
        (byte_fallback(), [the] * 40, " sat"),
        (byte_fallback(), [], "sat"),
        (byte_fallback(), [the, end], "sat"),
        (chat, [sat, the], "sat"),  # a new answer
        (chat, [sat, the, cat], " sat"),  # a message that goes on
    ):
        detokenizer = Detokenizer(tokenizer, prompt)
        assert [detokenizer.add(sat), detokenizer.add(sat), detokenizer.finish()] == [text, " sat", ""]


def test_the_first_token_may_complete_a_character_of_the_prompt():
    *begun, last = byte_fallback_ids(*(f"<0x{byte:02X}>" for byte in "🙂".encode()))
    (the,) = byte_fallback_ids("▁the")
    detokenizer = Detokenizer(byte_fallback(), [the, *begun])
    assert [detokenizer.add(last), detokenizer.add(the)] == ["🙂", " the"]


# --- the pieces add up ----------------------------------------------------------------------------


# Single-byte tokens produce every kind of broken text.
SINGLE_BYTES = sorted(i for token, i in demo().get_vocab().items() if len(token) == 1)
ANY_TOKENS = st.lists(st.integers(0, len(demo().get_vocab()) - 1), max_size=24)


@settings(max_examples=120)
@given(ANY_TOKENS | st.lists(st.sampled_from(SINGLE_BYTES), max_size=16))
def test_the_pieces_of_any_tokens_and_bytes_add_up(ids):
    assert len(SINGLE_BYTES) == 256
    assert "".join(pieces(demo(), ids)) == demo().decode(ids)


CHARACTERS = [byte_fallback_ids(word) for word in WORDS] + [byte_fallback_ids(*EMOJI_BYTES)]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(CHARACTERS), max_size=8))
def test_the_pieces_of_a_tokenizer_with_byte_fallback_add_up(parts):
    ids = [token for part in parts for token in part]
    assert "".join(pieces(byte_fallback(), ids)) == byte_fallback().decode(ids)


def test_a_stray_byte_after_a_character_that_was_given_already_ends_nothing():
    """With this token, the tokenizer decodes the whole run of bytes as broken; delivered text cannot be taken back."""
    ids = byte_fallback_ids(*EMOJI_BYTES, "<0x82>", "▁the", "▁cat")
    assert "\ufffd" in byte_fallback().decode(ids)
    text = "".join(pieces(byte_fallback(), ids))
    assert text.startswith("🙂")
    assert text.endswith(" the cat")
    assert text.count("the") == text.count("cat") == 1


# --- pieces ---------------------------------------------------------------------------------------


def test_a_character_spread_over_tokens_comes_with_the_last_of_them():
    ids = demo().encode("a🙂b", add_special_tokens=False)
    given_pieces = pieces(demo(), ids)
    assert len(ids) > 3, "the emoji should be more than one token"
    shown = [piece for piece in given_pieces if piece]
    assert shown == ["a", "🙂", "b"]
    assert given_pieces[1:-3] == [""] * (len(ids) - 3)


def test_each_word_comes_with_its_token_and_keeps_its_space():
    ids = demo().encode(" return self.items", add_special_tokens=False)
    assert pieces(demo(), ids) == [demo().decode([token]) for token in ids] + [""]
    assert demo().decode(ids[:1]).startswith(" ")


# --- tokens that never make up a character --------------------------------------------------------


class CountingDecoder(DecodeOnly):
    """Counts the tokens that it decodes."""

    num_decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids)


class Vocabulary:
    """A tokenizer of a few words, each with a space before it unless it is the first; 0 has no text, 1 is a byte."""

    words = ("", "\ufffd", "▁a", "▁b")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[id] for id in ids).replace("▁", " ").removeprefix(" ")


def stray_bytes(number: int) -> list[int]:
    (byte,) = demo().encode("🙂", add_special_tokens=False)[-1:]
    assert demo().decode([byte]) == "\ufffd"
    return [byte] * number


STRAYS = {
    "demo": (demo, lambda: stray_bytes(1)[0]),
    "no text": (Vocabulary, lambda: 0),
    "no bytes": (Vocabulary, lambda: 1),
}


@sweep("kind", STRAYS)
def test_each_token_costs_the_decoding_of_a_bounded_number_whatever_they_are(kind):
    make, token = STRAYS[kind]
    tokenizer, ids = CountingDecoder(make()), [token()] * 300
    text = "".join(pieces(tokenizer, ids))
    assert text == make().decode(ids)
    assert tokenizer.num_decoded <= 100 * len(ids)


@sweep("number", range(10, 24))
def test_a_character_after_many_stray_bytes_is_whole(number):
    ids = [*stray_bytes(number), *demo().encode("🙂é a", add_special_tokens=False)]
    assert "".join(pieces(demo(), ids)) == demo().decode(ids)
    assert demo().decode(ids).endswith("🙂é a")


@sweep("number", [1, 16, 40])
def test_a_word_after_many_tokens_without_text_has_its_space(number):
    assert "".join(pieces(Vocabulary(), [2, *[0] * number, 3])) == "a b"


@sweep("text", ["é" * 60, "中文和日本語" * 10, "a🙂" * 30])
@sweep("step", [2, 3, 4, 6])
def test_tokens_that_each_end_within_a_character_lose_none(text, step):
    data = text.encode()
    parts = [data[:1], *(data[begin : begin + step] for begin in range(1, len(data), step))]
    assert "".join(pieces(Bytes(parts), list(range(len(parts))))) == text


# --- prompts --------------------------------------------------------------------------------------


def with_begin_of_text() -> TokenizerWrapper:
    """A tokenizer that puts a token in front of every text."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "hello": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))


def test_a_prompt_gets_exactly_one_begin_of_text_token():
    tokenizer = with_begin_of_text()
    assert encode_prompt("hello", tokenizer, 4) == (0, 2)
    assert encode_prompt("<s>hello", tokenizer, 4) == (0, 2)


@sweep("ids", [[5, 6, 7], (5, 6, 7), range(5, 8), iter([5, 6, 7])])
def test_a_prompt_may_be_any_sequence_of_ids(ids):
    assert encode_prompt(ids, None, 10) == (5, 6, 7)


LONGEST = 45  # characters of the longest token of the demo pair


@sweep("text", [" " * LONGEST * 100, "\n" * LONGEST * 200, "é" * LONGEST * 100])
def test_a_text_that_cannot_fit_in_the_context_is_refused_before_it_is_tokenised(text):
    tokenizer: Any = SimpleNamespace(bos_token=None, _tokenizer=demo()._tokenizer)  # it cannot encode
    with pytest.raises(PromptTooLongError, match=rf"prompt is too long: {len(text) // LONGEST} tokens > 99 maximum"):
        encode_prompt(text, tokenizer, 4096, 100)


def test_a_text_is_not_refused_by_length_where_characters_may_be_merged():
    # Everything unknown between two blanks is one token.
    assert encode_prompt("x" * 5000, with_begin_of_text(), 4, 100) == (0, 3)


def test_more_ids_than_the_context_holds_are_refused_before_they_are_looked_at():
    with pytest.raises(PromptTooLongError, match="prompt is too long: 100 tokens > 99 maximum"):
        encode_prompt(["no id"] * 100, None, 10, 100)
