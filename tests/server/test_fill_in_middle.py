"""Fill-in-the-middle with real tokenizers, made as those of the families are: BPE of the library `tokenizers`.

Their vocabularies are small. What counts is how texts and markers are told apart, and where spaces are added.
"""

import functools
from collections.abc import Callable
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from sweeps import sweep
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import CodeLlamaTokenizer, PreTrainedTokenizerFast

from runtime.server.models.fill_in_middle import fill_in_middle

CODE = [
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n",
    "    return quicksort(less) + [pivot] + quicksort(more)\n\n\nfor item in items: print(item)\n",
]
PAIRS = [
    *[("def f(x):\n    ", "\n    return x\n"), ("items = quick", "(items)\n"), (" two spaces ", "  in front")],
    *[("", " return items"), ("def f(", ""), ("naïve 🙂 = 1", "🙂 中文\n")],
]
pairs = sweep(("prefix", "suffix"), PAIRS)
QWEN_PARTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    parts: pre_tokenizers.PreTokenizer, markers: list[str], *, is_special: bool, begin: str | None = None, **tokens: str
) -> TokenizerWrapper:
    """A byte-level tokenizer; its markers are added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = parts, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CODE, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in markers])
    return wrapped(tokenizer, begin, **tokens)


def wrapped(tokenizer: Tokenizer, begin: str | None, **tokens: str) -> TokenizerWrapper:
    tokenizer.add_special_tokens(list(dict.fromkeys([*filter(None, [begin]), *tokens.values()])))
    if begin is not None:
        ids = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=ids)
        tokens = {**tokens, "bos_token": begin}
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens))


def pieces(markers: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges of a tokenizer like sentencepiece's, with bytes for what has no token."""
    names = ["<unk>", "<s>", "</s>", *markers, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({*"".join(CODE).replace(" ", "▁").replace("\n", ""), "▁", "x", "f", "1"})
    merges = [("▁", "r"), ("▁", "i"), ("i", "t"), ("e", "m"), ("▁", "▁"), ("▁i", "t"), ("▁it", "em"), ("▁", "x")]
    tokens = dict.fromkeys([*names, *letters, *("".join(merge) for merge in merges)])
    return {token: id for id, token in enumerate(tokens)}, merges


def codestral() -> TokenizerWrapper:
    vocabulary, merges = pieces(["[SUFFIX]", "[PREFIX]", "[MIDDLE]"])
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["[SUFFIX]", "[PREFIX]", "[MIDDLE]"])
    return wrapped(tokenizer, "<s>", eos_token="</s>", unk_token="<unk>")


def code_llama() -> TokenizerWrapper:
    vocabulary, merges = pieces(["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"])
    return TokenizerWrapper(CodeLlamaTokenizer(vocab=vocabulary, merges=merges))


def code_gemma() -> TokenizerWrapper:
    markers = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"]
    vocabulary, merges = pieces(markers)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(markers)
    return wrapped(tokenizer, "<bos>", eos_token="<eos>", unk_token="<unk>")


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
OF_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
QWEN = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_PARTS), "isolated"), OF_WORDS])
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])

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
        lambda: byte_level(QWEN, QWEN_MARKERS, is_special=False, **QWEN_ENDS),
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|file_sep|>", "<|repo_name|>"),
    ),
    "StarCoder2": (
        lambda: byte_level(DIGITS, STAR_MARKERS, is_special=True, **STAR_ENDS),
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    "DeepSeek-Coder": (
        lambda: byte_level(GPT2, DEEP_MARKERS, is_special=False, **DEEP_ENDS),
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
    assert fill_in_middle(byte_level(GPT2, ["<fim_prefix>", "<fim_suffix>"], is_special=True)) is None
