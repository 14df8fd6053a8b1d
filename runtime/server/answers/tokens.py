"""The tokens of an answer as a request wants them: split into text, reasoning and calls, with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper
from typing_extensions import TypedDict

from runtime.generation.answers.message_format import message_format
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template.known import structural_markers, tags_of
from runtime.generation.token_stream import TokenStream
from runtime.generation.tokens import Token
from runtime.generation.tool_calls.events import Delta, ToolCall
from runtime.loading.vocabularies import byte_fallback, byte_level_piece
from runtime.server.answers.request import GenerationRequest

EndReason = Literal["stop", "length", "cancelled"]

# In place of the stop reason, which no token has that ends a text by its length.
_CANCELLED, _NOTHING = "cancelled", "nothing"


def end_without_token(stream: TokenStream | None) -> Token:
    """What ends the text of a cancelled stream, with the text that it withheld; or one for which nothing is generated.

    It is no token: see `tokens_among`.
    """
    if stream is None:
        return Token(0, "", 0, None, finish_reason="length", stop_reason=_NOTHING)
    index = stream.answer.num_tokens
    return Token(0, stream.tail, index, None, finish_reason="length", stop_reason=_CANCELLED)


def tokens_among(tokens: Sequence[Token]) -> Sequence[Token]:
    """The tokens, but for an end without one."""
    if tokens and tokens[-1].finish_reason == "length" and tokens[-1].stop_reason is not None:
        return tokens[:-1]
    return tokens


def end_reason(token: Token) -> EndReason | None:
    """Why the text ends with a token; None if it goes on."""
    is_cancelled = token.finish_reason == "length" and token.stop_reason == _CANCELLED
    return "cancelled" if is_cancelled else token.finish_reason


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
