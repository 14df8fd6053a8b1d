"""Tokenizers of GGUF files, against the same vocabularies in tokenizer.json, and against known splits."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import pytest
from sample_tokenizers import SCRIPTS, demo
from sweeps import sweep
from tokenizers import Regex, pre_tokenizers

import runtime
from runtime.loading.gguf.container import read
from runtime.loading.gguf.pre_tokenizers import PRE_TOKENIZERS
from runtime.loading.gguf.vocabulary import tokenizer_of

QWEN_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{{ tool_call.name }}{% endif %}"
)


def tokenizer(path: Path, keys: dict[str, Any], architecture: str = "llama") -> Any:
    weight = {"token_embd.weight": np.zeros((2, 2), np.float32)}
    return tokenizer_of(read(gguf_files.write(path / "t.gguf", architecture, keys, weight)))


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A vocabulary of bytes and a few pieces, of which the better one of two overlapping ones is the later one."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁abc", "é", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, "<|user|>", "  "]
    scores = [0.0] * 259 + [-float(i) for i in (9, 8, 7, 6, 5, 4, 3, 2, 10, 11)] + [0.0, 0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4]
    keys = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def of_demo(**changes: Any) -> dict[str, Any]:
    """The demo pair's vocabulary of byte-level BPE, as llama.cpp's converter writes it."""
    saved = json.loads((Path(runtime.DEMO_TARGET) / "tokenizer.json").read_text("utf-8"))
    ids = demo().get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {each["content"] for each in saved["added_tokens"] if each["special"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]]
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in special else 1 for token in tokens],
        "merges": merges,
        "eos_token_id": demo().eos_token_id,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


def test_byte_level_ids_are_those_of_the_same_vocabulary(tmp_path: Path) -> None:
    ours, theirs = tokenizer(tmp_path, of_demo()), demo()
    for text in SCRIPTS:
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_token_ids == theirs.eos_token_ids


@sweep(
    "pre, text, words",
    [
        ("gpt-2", "I'll pay 123 €", ["I", "'ll", " pay", " 123", " €"]),
        ("smollm", "I'll pay 123", ["I", "'ll", " pay", " ", "1", "2", "3"]),
        ("llama-bpe", "it'LL be 12345!\n\n x", ["it", "'LL", " be", " ", "123", "45", "!\n\n", " x"]),
        ("qwen2", "a  b\n  12", ["a", " ", " b", "\n", " ", " ", "1", "2"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "don't helloWorld's 1234/\n", ["don't", " hello", "World's", " ", "123", "4", "/\n"]),
        ("deepseek-llm", "ab 中文 12.\n", ["ab", " ", "中文", " ", "12", ".", "\n"]),
        ("deepseek-v3", "ab中文 1234.x", ["ab", "中文", " ", "123", "4", ".x"]),
        ("deepseek-coder", "x12 中!", ["x", "1", "2", " ", "中", "!"]),
        ("falcon", "a12345==b", ["a", "123", "45", "==", "b"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
    ],
)
def test_words_are_split_as_each_pre_tokenizer_does(pre: str, text: str, words: list[str]) -> None:
    patterns = PRE_TOKENIZERS[pre].patterns
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] == words


@sweep("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_every_text(pre: str, tmp_path: Path) -> None:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    for text in SCRIPTS:
        assert "".join(word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)) == text


@sweep(
    "text, changes, tokens",
    [
        ("abc", {}, ["▁abc"]),
        ("a bc", {}, ["▁a", "▁", "bc"]),  # "bc" has a higher score than "ab"
        ("abc", {"add_space_prefix": False}, ["a", "bc"]),
        ("é€", {}, ["▁", "é", "<0xE2>", "<0x82>", "<0xAC>"]),
        ("a<|user|>a", {"add_space_prefix": False}, ["a", "<|user|>", "a"]),
        ("a  b", {"add_space_prefix": False}, ["a", "  ", "b"]),
        ("", {}, []),
    ],
)
def test_sentencepiece_merges_by_scores(text: str, changes: Any, tokens: list[str], tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, sentencepiece(**changes))
    ids = ours.encode(text, add_special_tokens=False)
    assert ours.convert_ids_to_tokens(ids) == tokens
    assert ours.decode(ids) == text
    assert type(ours.detokenizer).__name__ == "SPMStreamingDetokenizer"


@sweep(
    "keys, begin, end",
    [
        (sentencepiece(), ["<s>"], []),
        (sentencepiece(add_bos_token=False), [], []),
        (sentencepiece(add_eos_token=True), ["<s>"], ["</s>"]),
        (gguf_files.byte_level_fields(pre="llama-bpe") | {"tokenizer.ggml.bos_token_id": 95}, ["<|im_end|>"], []),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.bos_token_id": 95}, [], []),
    ],
)
def test_texts_begin_and_end_as_the_file_says(keys: Any, begin: list[str], end: list[str], tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, keys)
    tokens = ours.convert_ids_to_tokens(ours.encode("abc"))
    assert tokens[: len(begin)] == begin
    assert tokens[len(tokens) - len(end) :] == end
    assert len(tokens) == len(begin) + len(end) + len(ours.encode("abc", add_special_tokens=False))


def test_every_token_that_ends_an_answer_is_known(tmp_path: Path) -> None:
    keys = gguf_files.byte_level_fields()
    keys["tokenizer.ggml.tokens"][90:94] = ["<|eot_id|>", "<eom>", "<eot>", "<|endoftext|>"]
    keys["tokenizer.ggml.token_type"][90:93] = [3, 3, 3]  # the last one is a word like any other
    ours = tokenizer(tmp_path, keys | {"tokenizer.ggml.eom_token_id": 91, "tokenizer.ggml.eot_token_id": 92})
    assert ours.eos_token_ids == {90, 91, 92, 95}


def test_the_template_and_how_it_calls_tools_come_from_the_file(tmp_path: Path) -> None:
    keys = gguf_files.byte_level_fields() | {"tokenizer.chat_template": QWEN_TEMPLATE}
    ours = tokenizer(tmp_path, keys)
    assert ours.has_tool_calling
    assert ours.tool_call_start == "<tool_call>"
    assert ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    several = tokenizer(tmp_path, keys | {"tokenizer.chat_template.tool_use": "tools"})
    assert several.chat_template == {"default": QWEN_TEMPLATE, "tool_use": "tools"}


def test_special_tokens_of_phi_3_swallow_the_space_behind(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path, sentencepiece(), architecture="phi3")
    ids = ours.encode("<|user|>\n a", add_special_tokens=False)
    assert ours.convert_ids_to_tokens(ids) == ["<|user|>", "▁a"]


@sweep(
    "keys, complaint",
    [
        (gguf_files.byte_level_fields(pre="novel"), "has the pre-tokenizer 'novel' .*, and known are bailingmoe, "),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.pre": None}, "has the pre-tokenizer None"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.model": "t5"}, "of the kind 't5' .*, and known are"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.merges": None}, "has no tokenizer.ggml.merges"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.merges": ["a zz"]}, "cannot be used: .*; download"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.tokens": None}, "has no tokens"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.tokens": ["a", "a"]}, "has the token 'a' twice"),
        (gguf_files.byte_level_fields() | {"tokenizer.ggml.token_type": [1]}, "1 token types for 96 tokens"),
        (sentencepiece(scores=[1.0]), "has 1 scores for 271 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_named(keys: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(runtime.ModelError, match=complaint):
        tokenizer(tmp_path, keys)
