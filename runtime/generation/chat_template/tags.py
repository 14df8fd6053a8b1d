"""The tags around a model's reasoning, as text and as token ids, and other markers of its answers' structure."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any, cast

from runtime.generation.answers.message_format import special_tokens_of
from runtime.generation.chat_template.known import once_per_template, source_of

# The opening and the closing tag of reasoning, and the ids of each.
Tags = tuple[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]]

# Names of tags: "<think>", "[THINK]", "<seed:think>", "<reasoning>", "<|START_THINKING|>", Apertus' "<|inner_prefix|>".
_NAME = re.compile(r"think|thought|reason|inner_prefix", re.IGNORECASE)
# Tags that are ordinary text, which only a template names.
_IN_TEMPLATE = re.compile(r"</?((?:\w+:)?(?:think|thinking|thought|reasoning)(?::\w+)?)>")
_CLOSING_WORDS = (("START", "END"), ("start", "end"), ("begin", "end"), ("prefix", "suffix"))
# Markers around the answer after the reasoning, of which mlx-lm does not know: Cohere's.
_AROUND_ANSWERS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


@once_per_template
def tags_of(tokenizer: Any) -> Tags | None:
    """The opening and the closing tag of a model's reasoning, and the ids of each; None if it has none.

    A tag that is ordinary text has no ids of its own, since its neighbours decide on its tokens.
    """
    if tokenizer.has_thinking:
        texts = cast(tuple[str, str], (tokenizer.think_start, tokenizer.think_end))
        return texts, (tuple(tokenizer.think_start_tokens or ()), tuple(tokenizer.think_end_tokens or ()))
    tokens = special_tokens_of(tokenizer)
    for opening in filter(_NAME.search, tokens):
        if closing := _closing(opening, tokens):
            return (opening, closing), ((tokens[opening],), (tokens[closing],))
    in_template = _IN_TEMPLATE.search(source_of(tokenizer))
    return ((f"<{in_template[1]}>", f"</{in_template[1]}>"), ((), ())) if in_template else None


def _closing(opening: str, tokens: Container[str]) -> str | None:
    """The closing tag among some tokens, if one of them is the tag that opens; None without one."""
    slashed = re.sub(r"(?=\w)", "/", opening, count=1)
    others = (opening.replace(begin, end) for begin, end in _CLOSING_WORDS)
    return next((text for text in (slashed, *others) if text != opening and text in tokens), None)


def structural_markers(tokenizer: Any) -> tuple[str, ...]:
    """Markers of the structure of answers besides those of reasoning and calls; they are part of no text."""
    tokens = special_tokens_of(tokenizer)
    of_cohere = (marker for marker in _AROUND_ANSWERS if marker in tokens)
    return (*(getattr(tokenizer, "structural_markers", None) or ()), *of_cohere)


def last_index(tokens: Sequence[int], wanted: tuple[int, ...]) -> int:
    """Where the last occurrence of some tokens begins; -1 if there is none, or if none are wanted."""
    starts = (i for i in range(len(tokens) - len(wanted), -1, -1) if wanted and tokens[i] == wanted[0])
    return next((i for i in starts if tuple(tokens[i : i + len(wanted)]) == wanted), -1)
