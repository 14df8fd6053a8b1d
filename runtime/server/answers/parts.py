"""Parts of an answer: its tokens, split into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.events import AnswerEvent, CallEnded, ReasoningPart, TextPart

if TYPE_CHECKING:
    from runtime.generation.token_reader import Token


class AnswerSplitter:
    """Splits the tokens of one answer into parts, in the order in which they were generated.

    Attributes:
        num_reasoning_tokens: number of tokens so far that were reasoning, tags included.
        has_calls: whether a call is complete.
        has_reasoning: whether reasoning is told apart; otherwise the whole text is the answer.
    """

    def __init__(self, reader: AnswerReader, *, has_reasoning: bool) -> None:
        """For one answer.

        Args:
            reader: splits the text; new.
            has_reasoning: see above.
        """
        self.num_reasoning_tokens = 0
        self.has_calls = False
        self.has_reasoning = has_reasoning
        self._reader = reader

    def add(self, tokens: Sequence[Token]) -> list[AnswerEvent]:
        """The parts that the next tokens add: text may be withheld that can be the beginning of a tag or a call."""
        if self.has_reasoning:
            self.num_reasoning_tokens += sum(token.is_thinking for token in tokens)
        parts = self._reader.add("".join(token.text for token in tokens))
        if tokens and tokens[-1].finish_reason is not None:
            parts += self._reader.finish(is_complete=tokens[-1].is_complete)
        self.has_calls |= any(isinstance(part, CallEnded) for part in parts)
        return [part for part in parts if not isinstance(part, (TextPart, ReasoningPart)) or part.text]
