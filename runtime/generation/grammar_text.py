"""The text that a grammar forces: brackets, keys, quotes, the rest of an enumeration's value.

llguidance says which bytes must come next. Hardly ever is only one token allowed there, since a token may reach into
what follows, so the usual tokenisation of the bytes is proposed. Between two tokens of JSON a grammar may allow blanks.
They are guessed to be those that the text had at the last such place, and what is forced after them follows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from protocol.copying import Forced

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Longest text that is looked for at once. Most keys are shorter, and the rest is found in the next round.
_MAX_BYTES = 256
_BLANKS = b" \t\n"
# What may come behind a blank of JSON, and what a number begins with.
_BEGINS, _NUMBERS = ([bytes([byte]) for byte in some] for some in (b' "[{tfn,:}]\n', b"-0123456789"))
# llguidance's form of a special token in bytes.
_SPECIAL = re.compile(rb"\xff\[(\d+)\]")


class GrammarText:
    """What a grammar forces in one text; see `protocol.logits_processors.ForcedText`.

    Copying the matcher of a long text takes longer than all the rest. So there is a second one, which goes ahead of the
    text, and is copied only where drafted tokens were rejected.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer) -> None:
        """Of a text that begins now; the matcher is this object's own, and the vocabulary the matcher's."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        blank, one = (vocabulary.tokenize_bytes(text) for text in (b" ", b"1"))
        self._is_number_apart = vocabulary.tokenize_bytes(b" 1") == [*blank, *one]
        begun = [(byte, vocabulary.tokenize_bytes(byte)) for byte in (*_BEGINS, *_NUMBERS)]
        self._begun = [(byte, [*blank, *tokens]) for byte, tokens in begun if tokens]
        self._text = b""
        self._blanks = _Blanks()
        self._ahead: tuple[tuple[int, ...], LLMatcher] | None = None  # after some drafted tokens

    def append(self, tokens: Sequence[int]) -> None:
        """See `protocol.logits_processors.ForcedText`."""
        drafted, ahead = self._ahead or ((), None)
        self._ahead = None
        if ahead is not None and tuple(tokens[: len(drafted)]) == drafted:
            ahead.consume_tokens(list(tokens[len(drafted) :]))
            self._ahead = (), ahead
        self._matcher.consume_tokens(list(tokens))
        self._text += self._vocabulary.decode_bytes(list(tokens))
        self._blanks.learn(self._text)

    def num_allowed(self, beyond: Sequence[int], tokens: Sequence[int]) -> int:
        """See `protocol.logits_processors.ForcedText`."""
        return self._matcher_after(beyond).validate_tokens(list(tokens))

    def after(self, beyond: Sequence[int]) -> list[Forced]:
        """See `protocol.logits_processors.ForcedText`."""
        matcher, text = self._matcher_after(beyond), self._text
        if matcher.is_stopped():
            return []
        if beyond:
            text += self._vocabulary.decode_bytes(list(beyond))
        begin, written, doubts = len(text), b"", dict[int, int]()
        consumed, asked = list[int](), list[int]()
        while len(text) < begin + _MAX_BYTES:
            piece, place = matcher.compute_ff_bytes()[:_MAX_BYTES], len(text)
            if not piece and text and (following := self._after_blank(matcher)) is not None:
                asked.append(place)
                blanks = self._blanks.guess(text, following)
                doubts |= dict.fromkeys(range(place, place + len(blanks) + 1), 1)
                if text[-1:].isalnum():
                    doubts[place] = 2
                piece = blanks + following
            tokens = self._tokenised(piece)
            if not tokens or not _allows(matcher, tokens):
                break
            matcher.consume_tokens(tokens)
            consumed += tokens
            written += piece
            text += self._vocabulary.decode_bytes(tokens)
        tokens, forced, place = self._tokenised(written) or consumed, list[Forced](), begin
        for token in tokens:
            end = place + len(self._vocabulary.decode_bytes([token]))
            # Something may follow that becomes part of the last token.
            is_open = end >= len(text) and not matcher.is_stopped()
            doubt = max([doubts.get(byte, 0) for byte in range(place, end)], default=0)
            forced.append(Forced(token, max(doubt, is_open)))
            place = end
        if not beyond:
            self._blanks.foresee(text, asked)
        self._ahead = (*beyond, *tokens), matcher
        return forced

    def _matcher_after(self, beyond: Sequence[int]) -> LLMatcher:
        """The matcher that goes ahead, after the text and drafted tokens; stopped if the grammar forbids them."""
        drafted, ahead = self._ahead or ((), None)
        if ahead is None or tuple(beyond[: len(drafted)]) != drafted:
            drafted, ahead = (), self._matcher.deep_copy()
        ahead.consume_tokens(list(beyond[len(drafted) :]))
        self._ahead = tuple(beyond), ahead
        return ahead

    def _after_blank(self, matcher: LLMatcher) -> bytes | None:
        """The byte that must follow if only blanks are free before it; empty if a number must, which has a token of its
        own; None if more is free. One blank shows it, unless the grammar allows any number of blanks.
        """
        may_follow = (byte for byte, tokens in self._begun if _allows(matcher, tokens))
        first = next(may_follow, b"")
        if next(may_follow, b""):  # in a string, nearly anything may follow
            return b"" if first in _NUMBERS and self._is_number_apart else None
        return None if not first or first.isspace() else first

    def _tokenised(self, text: bytes) -> list[int]:
        """The usual tokenisation; empty if the tokenizer changes such a text."""
        tokens: list[int] = []
        for index, part in enumerate(_SPECIAL.split(text)):
            if index % 2:
                tokens.append(int(part))
            elif part:
                found = self._vocabulary.tokenize_bytes(part)
                if self._vocabulary.decode_bytes(found) != part:
                    return []
                tokens += found
        return tokens


def _allows(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    """Whether all of some tokens may follow."""
    return matcher.validate_tokens(list(tokens)) == len(tokens)


# A place between two tokens of JSON: in front of a byte, if True, or behind it.
_Place = tuple[bool, int]
_BEHIND_COMMA, _BEHIND_COLON, _BEHIND_BRACE = (False, ord(",")), (False, ord(":")), (False, ord("{"))


@attrs.define
class _Blanks:
    """The blanks that one text has between tokens of JSON, by their places."""

    # Within a line, the blanks as they are; of a new line, how much further it is indented than the line before.
    _known: dict[_Place, bytes | int] = attrs.field(factory=dict)
    # A text that was foreseen, and where it might have had blanks; learnt from once the text is there.
    _foreseen: bytes = b""
    _places: list[int] = attrs.field(factory=list)

    def guess(self, text: bytes, following: bytes) -> bytes:
        """The blanks between a text, which is not empty, and what follows it; that is empty if it is a number."""
        place = _place(text, following)
        known = self._known.get(place)
        if known is None and isinstance(step := self._known.get(_BEHIND_BRACE), int):
            # An object over several lines: each member has its own.
            known = 0 if place == _BEHIND_COMMA else -step if following[:1] in (b"}", b"]") else None
        if known is None and place in (_BEHIND_COMMA, _BEHIND_COLON):
            other = self._known.get(_BEHIND_COLON if place == _BEHIND_COMMA else _BEHIND_COMMA)
            known = other if isinstance(other, bytes) else b" "
        if isinstance(known, int):
            return b"\n" + b" " * (_indentation(text) + known)
        return known or b""

    def foresee(self, text: bytes, places: Sequence[int]) -> None:
        """Note how the text may go on, and where it may have blanks."""
        self._foreseen, self._places = text, [*self._places, *places]

    def learn(self, text: bytes) -> None:
        """Learn from the text that has come."""
        places, self._places = self._places, []
        for place in places:
            following = text[place:].lstrip(_BLANKS)
            if text[:place] != self._foreseen[:place]:
                continue
            if not following:
                self._places.append(place)
                continue
            blanks = text[place : len(text) - len(following)]
            further = len(blanks) - blanks.rfind(b"\n") - 1 - _indentation(text[:place])
            self._known[_place(text[:place], following)] = further if b"\n" in blanks else blanks


def _place(text: bytes, following: bytes) -> _Place:
    return (True, following[0]) if following and following[0] in b",:}]" else (False, text[-1])


def _indentation(text: bytes) -> int:
    """Of the last line."""
    line = text[text.rfind(b"\n") + 1 :]
    return len(line) - len(line.lstrip(b" "))
