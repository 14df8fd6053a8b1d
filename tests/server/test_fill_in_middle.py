"""Fill-in-the-middle with real tokenizers, to which the tokens of the families are added.

What counts is how texts and markers are told apart, and where spaces are added.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from other_vocabularies import sentencepiece
from sample_tokenizers import demo
from sweeps import sweep
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from transformers import CodeLlamaTokenizer, PreTrainedTokenizerFast

from runtime.server.models.fill_in_middle import fill_in_middle

PAIRS = [
    *[("def f(x):\n    ", "\n    return x\n"), ("items = quick", "(items)\n"), (" two spaces ", "  in front")],
    *[("", " return items"), ("def f(", ""), ("naïve 🙂 = 1", "🙂 中文\n")],
]
pairs = sweep(("prefix", "suffix"), PAIRS)


def copied(tokenizer: TokenizerWrapper) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())


def wrapped(tokenizer: Tokenizer, begin: str | None = None, **tokens: str) -> TokenizerWrapper:
    tokenizer.add_special_tokens(list(dict.fromkeys([*filter(None, [begin]), *tokens.values()])))
    if begin is not None:
        ids = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
        tokens = {**tokens, "bos_token": begin}
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens))


def byte_level(markers: list[str], *, is_special: bool, begin: str | None = None, **tokens: str) -> TokenizerWrapper:
    """A byte-level tokenizer; its markers are added tokens."""
    tokenizer = copied(demo())
    tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in markers])
    return wrapped(tokenizer, begin, **tokens)


def codestral() -> TokenizerWrapper:
    tokenizer = copied(sentencepiece().tokenizer)
    tokenizer.add_special_tokens(["[SUFFIX]", "[PREFIX]", "[MIDDLE]"])
    return wrapped(tokenizer, "<s>", eos_token="</s>", unk_token="<unk>")


def code_llama() -> TokenizerWrapper:
    model = json.loads(copied(sentencepiece().tokenizer).to_str())["model"]
    vocabulary = list(dict.fromkeys([*model["vocab"], "▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"]))
    merges = [tuple(merge) for merge in model["merges"]]
    return TokenizerWrapper(CodeLlamaTokenizer(vocab={token: id for id, token in enumerate(vocabulary)}, merges=merges))


def code_gemma() -> TokenizerWrapper:
    tokenizer = copied(sentencepiece().tokenizer)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"])
    return wrapped(tokenizer, "<bos>", eos_token="<eos>", unk_token="<unk>")


# As a model card has it: the prompt as one text, and what begins it; and tokens that end the middle.
Card = tuple[Callable[[], TokenizerWrapper], str, tuple[str, ...]]
QWEN_MARKERS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
QWEN_ENDS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
STAR_MARKERS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file_sep>"]
STAR_ENDS = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
DEEP_MARKERS = ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"]
DEEP_ENDS = {"begin": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
BY_CARD: dict[str, Card] = {
    "Qwen2.5-Coder": (
        lambda: byte_level(QWEN_MARKERS, is_special=False, **QWEN_ENDS),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|file_sep|>", "<|repo_name|>"),
    ),
    "StarCoder2": (
        lambda: byte_level(STAR_MARKERS, is_special=True, **STAR_ENDS),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    "DeepSeek-Coder": (
        lambda: byte_level(DEEP_MARKERS, is_special=False, **DEEP_ENDS),
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        ("<｜fim▁hole｜>",),
    ),
    "CodeGemma": (code_gemma, "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>", ("<|file_separator|>",)),
}


@functools.cache
def made(family: str) -> TokenizerWrapper:
    makers: dict[str, Any] = {name: card[0] for name, card in BY_CARD.items()}
    return ({**makers, "Codestral": codestral, "CodeLlama": code_llama}[family])()


@pairs
@sweep("family", BY_CARD)
def test_a_prompt_is_what_the_tokenizer_makes_of_the_text_on_the_model_card(family, prefix, suffix):
    _, card, ends = BY_CARD[family]
    tokenizer = made(family)
    fill = fill_in_middle(tokenizer)
    assert list(fill.prompt(prefix, suffix, tokenizer)) == tokenizer.encode(card.format(prefix=prefix, suffix=suffix))
    assert {tokenizer.convert_tokens_to_ids(end) for end in ends} <= set(fill.stop_tokens)


def spelled(tokenizer: Any, tokens: list[int]) -> str:
    """The text of tokens, with every space that is in them."""
    return tokenizer.backend_tokenizer.decoder.decode(["x", *tokenizer.convert_ids_to_tokens(tokens)])[1:]


@pairs
@sweep("family", ["Codestral", "CodeLlama"])
def test_sentencepiece_puts_a_space_in_front_of_the_prefix_alone(family, prefix, suffix):
    """So do Meta's and Mistral's own encoders: the suffix goes on where the middle ends."""
    tokenizer = made(family)
    fill = fill_in_middle(tokenizer)
    begin, *tokens = fill.prompt(prefix, suffix, tokenizer)
    assert begin == tokenizer.bos_token_id
    if family == "Codestral":
        assert fill.middle is None
        assert tokens[0] == fill.suffix
        at = tokens.index(fill.prefix)
        after, before = tokens[1:at], tokens[at + 1 :]
    else:
        assert (tokens[0], tokens[-1]) == (fill.prefix, fill.middle)
        at = tokens.index(fill.suffix)
        before, after = tokens[1:at], tokens[at + 1 : -1]
        assert tokenizer.convert_tokens_to_ids("▁<EOT>") in fill.stop_tokens
    assert spelled(tokenizer, after) == suffix
    assert before == tokenizer.encode(prefix, add_special_tokens=False)
    if prefix and not prefix.startswith(" "):
        assert spelled(tokenizer, before) == " " + prefix


def test_a_tokenizer_without_such_tokens_fills_in_nothing():
    assert fill_in_middle(byte_level(["<fim_prefix>", "<fim_suffix>"], is_special=True)) is None
