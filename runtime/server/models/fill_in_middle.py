"""Fill-in-the-middle: prompts from a prefix and a suffix, for models that were trained to write what is between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

# The tokens before prefix, suffix and middle, by family. A family without the last one puts the prefix last.
_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code, Seed-Coder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("[PREFIX]", "[SUFFIX]"),  # Codestral
)
# Tokens with which some of these models end the middle, besides their end of text.
_ENDS = (
    *("▁<EOT>", "<|endoftext|>", "<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|repo_name|>", "<reponame>"),
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "[MIDDLE]"),
)

# Put in front of a suffix that is tokenised, and removed from the tokens: a character that is part of no longer token.
_FRONT = "☺"


@attrs.frozen
class FillInMiddle:
    """The ids of the fill-in-the-middle tokens of one tokenizer."""

    prefix: int
    suffix: int
    middle: int | None  # None if the prefix comes last
    stop_tokens: tuple[int, ...]  # with which the text in the middle ends

    def prompt(self, prefix: str, suffix: str, tokenizer: TokenizerWrapper) -> tuple[int, ...]:
        """The token ids of a prompt for the text between a prefix and a suffix."""

        def encoded(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

        first = tokenizer.encode("", verbose=False)[:1] if tokenizer.bos_token is not None else []
        begin = [id for id in first if id == tokenizer.bos_token_id]
        before, after = encoded(prefix), encoded(suffix)
        if suffix and _adds_space(tokenizer, encoded("x")):
            # A suffix continues the middle, so it must get no space. Behind another text, the tokenizer adds none.
            joined, front = encoded(_FRONT + suffix), encoded(_FRONT)
            after = joined[len(front) :] if joined[: len(front)] == front else after
        if self.middle is None:
            return (*begin, self.suffix, *after, self.prefix, *before)
        return (*begin, self.prefix, *before, self.suffix, *after, self.middle)


def _adds_space(tokenizer: TokenizerWrapper, tokens: Sequence[int]) -> bool:
    """Whether a tokenizer prepends a space to a text, as sentencepiece does; `tokens` are those of "x"."""
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    return convert is not None and str(convert(tokens[0])).startswith("▁")


def fill_in_middle(tokenizer: TokenizerWrapper) -> FillInMiddle | None:
    """The fill-in-the-middle tokens of a tokenizer, or None. Takes a while, as it lists the whole vocabulary."""
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    for names in _FAMILIES:
        if all(name in vocabulary for name in names):
            prefix, suffix, *middle = ids = [vocabulary[name] for name in names]
            ends = [vocabulary[name] for name in _ENDS if name in vocabulary]
            return FillInMiddle(prefix, suffix, next(iter(middle), None), tuple(dict.fromkeys([*ids, *ends])))
    return None
