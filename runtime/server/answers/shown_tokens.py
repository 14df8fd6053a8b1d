"""The texts of tokens as a request wants them: with the stop string or token that ended the answer, or without special
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from runtime.server.openai.requests import ChatRequest, Request

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token

# Attributes of a tokenizer with the texts around reasoning and tool calls, which the answer reader needs.
_MARKS = ("think_start", "think_end", "tool_call_start", "tool_call_end")


class ShownTokens:
    """Changes the texts of an answer's tokens."""

    def __init__(self, request: Request, tokenizer: Any) -> None:
        """For one answer.

        Args:
            request: the request.
            tokenizer: the target's.
        """
        # Calls, where there may be some, are told apart by special tokens.
        has_tools = isinstance(request, ChatRequest) and bool(request.tools or request.functions)
        self._tokenizer = tokenizer
        self._shows_stop = bool(request.include_stop_str_in_output)
        self._hidden = _special_texts(tokenizer) if request.skip_special_tokens and not has_tools else {}

    def __call__(self, tokens: Sequence[Token]) -> Sequence[Token]:
        """The next tokens, with other texts."""
        if self._hidden:
            tokens = [attrs.evolve(token, text=self.without_special(token.id, token.text)) for token in tokens]
        if not self._shows_stop or not tokens or (stop := tokens[-1].stop_reason) is None:
            return tokens
        last = tokens[-1]
        text = stop if isinstance(stop, str) else self._tokenizer.decode([stop])
        return [*tokens[:-1], attrs.evolve(last, text=last.text + text)]

    def without_special(self, token: int, text: str) -> str:
        """The text that ends with a token, without the token if it is a special one that is hidden."""
        return text.removesuffix(self._hidden.get(token, ""))


def _special_texts(tokenizer: Any) -> dict[int, str]:
    """The texts of special tokens by id, without those that mark reasoning and calls."""
    marks = {getattr(tokenizer, name, None) for name in _MARKS}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {id: tokenizer.decode([id]) for id, token in added.items() if token.special}
    return {id: text for id, text in texts.items() if text not in marks}
