"""Tokenizers with byte fallback and byte-level tokens, and texts in many scripts."""

import functools
import itertools
import string
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import runtime

SCRIPTS = [
    "plain text, and then some",
    " a space in front",
    "   three of them, and some behind   ",
    "\n\n    def f(x):\n\treturn x\n",
    "Grüße, naïveté, Ĳsselmeer",
    "Ελληνικά и русский",
    "中文和日本語、한국어",
    "שלום ועולם مرحبا بالعالم",
    "नमस्ते दुनिया",
    "e\u0301 is not \u00e9",
    "🙂",
    "a 👩‍👩‍👧‍👦 family and a flag 🇳🇿!",
    "🙂🙂🙂 three in a row",
    "x\u200by \ufeff \u2028",
    "\ufffd is a character of its own",
    "ends in one: \ufffd",
]


class DecodeOnly:
    """A tokenizer that can only decode: all that a detokenizer has where there is no fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class Bytes:
    """A tokenizer whose ids stand for some bytes each."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    def decode(self, ids: list[int]) -> str:
        return b"".join(self._parts[id] for id in ids).decode(errors="replace")


WORDS = ["▁the", "▁cat", "▁sat", "s", "▁"]


EMOJI_BYTES = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


@functools.cache
def demo() -> TokenizerWrapper:
    """The demo pair's tokenizer."""
    return load(runtime.DEMO_TARGET)


@functools.cache
def byte_fallback() -> TokenizerWrapper:
    """A tokenizer like sentencepiece's: a space before each word but the first, and bytes for what has no token."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "</s>", *WORDS, *EMOJI_BYTES])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def word_tokenizer(words: Sequence[str], **options: Any) -> TokenizerWrapper:
    """A tokenizer with a token for each word, of which the first stands for unknown ones."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], **options))


@functools.cache
def byte_level() -> TokenizerWrapper:
    """A byte-level BPE tokenizer of a tiny model's vocabulary size: letters, spaces, and halves of characters."""

    def spelled(text: str) -> str:
        """One letter for each byte."""
        parts = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        return "".join(part for part, _ in parts)

    letters = [*"abcdefgh", *map("".join, itertools.product("abcdef", repeat=2))]
    halves = [spelled(text)[a:b] for text in ("🙂", "c🙂") for a, b in ((0, 2), (2, 4), (0, 1), (1, 4), (0, 3), (3, 5))]
    halves += [spelled(text)[a:b] for text in "中文" for a, b in ((0, 1), (1, 3), (0, 2), (2, 3))]
    halves += [spelled(text)[a:b] for text in "éم\u0301" for a, b in ((0, 1), (1, 2))]
    words = [spelled(text) for text in ("🙂", "中", " ", "\n", " the", " a", "\n\n", ".", ":", "!", "?", ";")]
    tokens = list(dict.fromkeys([*letters, *halves, *words]))
    tokens += [f"x{i}" for i in range(VOCAB_SIZE - len(tokens))]
    assert len(tokens) == len(set(tokens)) == VOCAB_SIZE
    tokenizer = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


class OneLetterTokenizer:
    """A tokenizer for scripted models: one letter for each id. The ids in `ends` end the text."""

    ALPHABET = string.ascii_letters + string.digits + ".,"

    def __init__(self, ends: Iterable[int] = (), *, fails_at: int | None = None) -> None:
        self.eos_token_ids = set(ends)
        self.has_thinking = False
        self._fails_at = fails_at

    def decode(self, tokens: Sequence[int]) -> str:
        if self._fails_at in tokens:
            raise ValueError(f"no token {self._fails_at}")
        return "".join(self.ALPHABET[token] for token in tokens)
