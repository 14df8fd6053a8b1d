"""Echoes: prompts that are repeated in front of their answers."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import attrs

from runtime.generation.text import Detokenizer

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


# Tokens before an answer that decide where its first spaces go, and complete its first character.
_NUM_LAST = 16


@attrs.frozen
class Echo:
    """A prompt as a response repeats it.

    Attributes:
        text: of the prompt.
        tokens: the text of each token, decoded alone.
        offsets: where in `text` each token begins.
        last_ids: its last tokens, with which what follows is decoded.
    """

    text: str
    tokens: list[str]
    offsets: list[int]
    last_ids: tuple[int, ...]


def make_echo(prompt: str | None, ids: tuple[int, ...], tokenizer: TokenizerWrapper) -> Echo:
    """An echo.

    Args:
        prompt: the text of the prompt; None if the request has token ids, which are decoded then.
        ids: its token ids.
        tokenizer: the target's.
    """
    detokenizer, decoded, ends = Detokenizer(tokenizer), "", [0]
    for id in ids:
        decoded += detokenizer.add(id)
        ends.append(len(decoded))
    decoded += detokenizer.unread
    text = decoded if prompt is None else prompt
    # A tokenizer may put special tokens and a space in front, which the prompt's text does not have, or has in part.
    num_added = max(0, len(decoded) - len(text))
    num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(decoded, text, strict=False)))
    offsets = [max(0, end - num_added, min(end, num_same)) for end in ends[:-1]]
    return Echo(text, [detokenizer.alone(id) for id in ids], offsets, ids[-_NUM_LAST:])
