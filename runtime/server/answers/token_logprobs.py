"""Tokens with their log-probabilities and their bytes, which may be a part of a character."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper
from typing_extensions import TypedDict

from runtime.generation.tokens import Token
from runtime.loading.vocabularies import byte_fallback, byte_level_piece
from runtime.server.answers.api import tokens_among

# In place of minus infinity, which JSON does not have; OpenAI's own.
_MIN_LOGPROB = -9999.0


class TopLogprob(TypedDict):
    """A token and its log-probability; `bytes` is null for part of a character whose bytes are unknown."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


def token_logprobs(
    tokens: Sequence[Token], tokenizer: TokenizerWrapper, num_top: int | None
) -> list[TokenLogprob] | None:
    """The log-probabilities of the tokens of a text, in the form of chats and responses.

    Args:
        num_top: how many of the most probable tokens to name beside each; None for no log-probabilities.
    """

    def named(id: int, text: str, logprob: float | None) -> TopLogprob:
        return {"token": text, "logprob": finite(logprob), "bytes": token_bytes(tokenizer, id, text)}

    if num_top is None:
        return None
    return [
        {
            **named(token.id, tokenizer.decode([token.id]), token.logprob),
            "top_logprobs": [named(top.id, top.text, top.logprob) for top in token.top_logprobs[:num_top]],
        }
        for token in text_tokens(tokens)
    ]


def text_tokens(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens without an end-of-text or stop token, which has no text."""
    tokens = tokens_among(tokens)
    return tokens[:-1] if tokens and tokens[-1].is_complete else tokens


def finite(logprob: float | None) -> float:
    """A log-probability for JSON."""
    return _MIN_LOGPROB if logprob is None else max(logprob, _MIN_LOGPROB)


def token_bytes(tokenizer: TokenizerWrapper, token: int, text: str) -> list[int] | None:
    """The bytes of a token; `text` is the token decoded alone.

    Returns: None if they are unknown: the token is part of a character, and the tokenizer has neither byte-level tokens
        nor byte fallback.
    """
    if "\ufffd" not in text:
        return list(text.encode())
    convert = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = None if convert is None else convert(token)
    if not isinstance(name, str):
        return None
    piece = byte_fallback(name)
    if piece is None:
        piece = byte_level_piece(name)
    return None if piece is None else list(piece)
