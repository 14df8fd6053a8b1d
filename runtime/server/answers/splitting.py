"""The tokens of an answer as a request wants them: their texts, split into text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from runtime.generation.answers.message_format import message_format
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template import structural_markers, tags_of
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.server.answers.request import GenerationRequest


@attrs.define
class AnswerSplitter:
    """Splits the tokens of one answer into parts, in the order in which they were generated.

    Attributes:
        num_reasoning_tokens: number of tokens so far that were reasoning, tags included.
        has_calls: whether a call is complete.
        required: a call of each function of which the answer must call one, without arguments; () if it need not.
    """

    _reader: Reader
    required: Sequence[ToolCall] = ()
    num_reasoning_tokens: int = attrs.field(init=False, default=0)
    has_calls: bool = attrs.field(init=False, default=False)
    _has_begun_call: bool = attrs.field(init=False, default=False)
    _has_left: bool = attrs.field(init=False, default=False)  # reasoning that was not closed, by a call

    def add(self, tokens: Sequence[Token]) -> list[Delta]:
        """The parts that the next tokens add. Text that may be the beginning of a tag or a call is withheld."""
        parts: list[Delta] = []
        # What may be reasoning is read token by token, since a call may end it.
        num_alone = max((i for i, token in enumerate(tokens, start=1) if token.is_thinking), default=0)
        for some in (*([token] for token in tokens[:num_alone]), tokens[num_alone:]):
            parts += self._reader.add("".join(token.text for token in some))
            for token in some:
                self.num_reasoning_tokens += self.is_reasoning(token)
                self._has_left = token.is_thinking and (self._has_left or self._reader.is_in_block)
        if tokens and tokens[-1].finish_reason is not None:
            last = self._reader.finish(is_complete=tokens[-1].is_complete)
            self._has_begun_call |= any(part.kind == "call_began" for part in (*parts, *last))
            is_head = not tokens[-1].is_complete and not self._has_begun_call
            parts += self._begun_call(last) if is_head else last
        self._has_begun_call |= any(part.kind == "call_began" for part in parts)
        self.has_calls |= any(part.kind == "call_ended" for part in parts)
        return [part for part in parts if part.index is not None or part.text]

    def _begun_call(self, parts: Sequence[Delta]) -> list[Delta]:
        """The last parts of an answer that ends in the name of a required call, with the call in place of its text."""
        text = "".join(part.source for part in parts if part.kind == "content")
        by_length: dict[int, list[ToolCall]] = {}
        for call in self.required:
            begun = [n for n in range(1, len(call.name)) if text.endswith(call.name[:n])]
            length = len(call.name) if call.name in text else max(begun, default=0)
            by_length.setdefault(length, []).append(call)
        longest = max(by_length, default=0)
        if longest == 0 or len(by_length[longest]) > 1:
            return list(parts)
        (call,) = by_length[longest]
        others = [part for part in parts if part.kind != "content"]
        return [*others, Delta("call_began", "", text, 0, call), Delta("call_broken", text, "", 0, call)]

    def is_reasoning(self, token: Token) -> bool:
        """Whether the last token, or the next one, is reasoning: between its tags, and before a call that ends it."""
        return self._reader.tells_reasoning and token.is_thinking and not (self._has_left or self._reader.is_in_block)


# Attributes of a tokenizer with the texts around tool calls, which the answer reader needs.
_MARKS = ("tool_call_start", "tool_call_end")


class ShownTokens:
    """Changes the texts of an answer's tokens to what a request wants to see."""

    def __init__(self, request: GenerationRequest, tokenizer: Any) -> None:
        # Where there may be calls, special tokens stay: calls are recognised by them.
        has_tools = request.chat is not None and request.chat.has_tools
        self._tokenizer = tokenizer
        self._shows_stop = request.includes_stop
        self._hidden = _special_texts(tokenizer) if request.skips_special_tokens and not has_tools else {}

    def __call__(self, tokens: Sequence[Token]) -> Sequence[Token]:
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
    messages, tags = message_format(tokenizer), tags_of(tokenizer)
    marks = [getattr(tokenizer, name, None) or "" for name in _MARKS]
    marks += [*structural_markers(tokenizer), *(messages.marks if messages else ()), *(tags or ((),))[0]]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    texts = {id: tokenizer.decode([id]) for id, token in added.items() if token.special}
    return {id: text for id, text in texts.items() if not any(text in mark for mark in marks)}
