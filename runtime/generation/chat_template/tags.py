"""The tags around a model's reasoning, as text and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from mlx_lm.tokenizer_utils import TokenizerWrapper

from runtime.generation.answers.message_format import special_tokens_of

# Tags that mlx-lm does not know: Magistral's and Ministral's, Seed-OSS', Apertus' and MiniMax M3's.
_FURTHER_TAGS = (
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<mm:think>", "</mm:think>"),
)


def tags_of(tokenizer: TokenizerWrapper) -> tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """The opening and the closing tag of a model's reasoning, and the ids of each; None if it has none."""
    if tokenizer.has_thinking:
        tags = cast(tuple[str, str], (tokenizer.think_start, tokenizer.think_end))
        return tags, (tuple(tokenizer.think_start_tokens or ()), tuple(tokenizer.think_end_tokens or ()))
    known = special_tokens_of(tokenizer)
    for opening, closing in _FURTHER_TAGS:
        if opening in known and closing in known:
            return (opening, closing), ((known[opening],), (known[closing],))
    return None


def last_index(tokens: Sequence[int], wanted: tuple[int, ...]) -> int:
    """Where the last occurrence of some tokens begins; -1 if there is none."""
    starts = (i for i in range(len(tokens) - len(wanted), -1, -1) if tokens[i] == wanted[0])
    return next((i for i in starts if tuple(tokens[i : i + len(wanted)]) == wanted), -1)
