"""Answers that consist of several messages, each with a header: gpt-oss' (OpenAI's "harmony") and Muse Spark's.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.read <|constrain|>json<|message|>{"path": "a"}<|call|>
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends within the header of the first message.

Sources: OpenAI's "Harmony response format" (the package openai-harmony needs a vocabulary from the network, so it reads
nothing here); `mlx_lm.chat_templates.muse_spark`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import attrs

# Of a message; a "block" has calls between markers of their own.
PartKind = Literal["content", "reasoning", "call", "block"]

_START, _CHANNEL, _HEADER_END = "<|start|>", "<|channel|>", "<|message|>"
# White space between two messages; more of it belongs to a text.
_MAX_SPACES = 8
_ROLE = "assistant"
_HEADER = re.compile(
    r"\s*(?:to=(?P<first>[^\s<]+))?\s*(?:<\|channel\|>\s*(?P<channel>\w+))?\s*(?:to=(?P<second>[^\s<]+))?\s*"
    r"(?P<type>(?:<\|constrain\|>)?\s*[\w./+-]+)?\s*"
)
# A header is shorter; it has the name of a function, which has 128 characters at most.
MAX_HEADER_CHARS = 256


@attrs.frozen
class MessageFormat:
    """A format of messages."""

    ends: tuple[str, ...]  # the markers of which one ends a message
    is_harmony: bool  # gpt-oss': channels, and calls that are messages

    start = _START
    header_end = _HEADER_END

    @property
    def needed(self) -> set[str]:
        """The markers by which the format is recognised."""
        return {_START, _HEADER_END, *({_CHANNEL, "<|end|>", "<|call|>"} if self.is_harmony else self.ends)}

    @property
    def marks(self) -> tuple[str, ...]:
        """All markers."""
        return (_START, _HEADER_END, *self.ends, *((_CHANNEL, "<|constrain|>") if self.is_harmony else ()))

    @property
    def _next_begins(self) -> tuple[str, ...]:
        # gpt-oss sometimes leaves the role out.
        return (_START, _CHANNEL) if self.is_harmony else (_START,)

    def next_begun(self, text: str) -> int | None:
        """Where the header of another message begins in the text behind the end of one; None if none follows."""
        words = text.lstrip()
        num_spaces = len(text) - len(words)
        if num_spaces > _MAX_SPACES or not words.startswith(self._next_begins):
            return None
        return num_spaces + (len(_START) if words.startswith(_START) else 0)

    def may_begin_next(self, text: str) -> bool:
        """Whether more of the text behind the end of a message may show that another message follows."""
        words = text.lstrip()
        return len(text) - len(words) <= _MAX_SPACES and any(begin.startswith(words) for begin in self._next_begins)

    def header(self, text: str) -> tuple[PartKind, str] | None:
        """The kind and the recipient of a message, of a call its function, by the text of its header, with or without
        the role; None if it is no header of an answer's message.
        """
        match = _HEADER.fullmatch(text.removeprefix(_ROLE))
        if match is None:
            return None
        recipient, channel = match["first"] or match["second"] or "", match["channel"]
        if match["type"] and not (recipient or channel):  # another role
            return None
        if not self.is_harmony:
            kinds: dict[str, PartKind] = {
                "": "content",
                "self": "reasoning",
                "user": "content",
                "commentary": "content",
            }
            return kinds.get(recipient, "block"), recipient
        if recipient:
            return "call", recipient.removeprefix("functions.")
        return "reasoning" if channel == "analysis" else "content", ""

    def may_be_header(self, text: str) -> bool:
        """Whether the beginning of a message may be that of a header, whose end has not come yet."""
        if len(text) > MAX_HEADER_CHARS or "\n" in text:
            return False
        for part in (_START, _ROLE):
            if part.startswith(text):
                return True
            text = text.removeprefix(part)
        text = text.lstrip()
        begins = ("to=", _CHANNEL, _HEADER_END) if self.is_harmony else ("to=", _HEADER_END)
        return any(begin.startswith(text) or text.startswith(begin) for begin in begins)


HARMONY = MessageFormat(("<|end|>", "<|return|>", "<|call|>"), is_harmony=True)
# What a call begins with, as the model is told to write it.
HARMONY_CALL = "<|channel|>commentary to=functions."
HARMONY_FINAL = "<|channel|>final<|message|>"
# The tags around the reasoning of an answer with one message of reasoning, for grammars.
HARMONY_TAGS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
MUSE_TAGS = (" to=self<|message|>", "<|eom|><|start|>assistant")
# By these tags, the header of the content.
FINALS: dict[tuple[str, str] | None, str] = {HARMONY_TAGS: HARMONY_FINAL, MUSE_TAGS: " to=user<|message|>"}
MUSE_SPARK = MessageFormat(("<|eom|>", "<|eot|>"), is_harmony=False)


_special_tokens: WeakKeyDictionary[Any, Mapping[str, int]] = WeakKeyDictionary()


def special_tokens_of(tokenizer: Any) -> Mapping[str, int]:
    """The special tokens of a tokenizer by their texts. Listing them takes 20 ms for some, so they are kept."""
    if not hasattr(tokenizer, "get_added_vocab"):
        return {}
    if tokenizer not in _special_tokens:
        _special_tokens[tokenizer] = dict(tokenizer.get_added_vocab())
    return _special_tokens[tokenizer]


def message_starts(tokenizer: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    """The lengths of a prompt before its second and third and before its last three messages, which begin with the
    special token that is most frequent in the prompt, of several the first.
    """
    special = set(special_tokens_of(tokenizer).values())
    found = [(position, token) for position, token in enumerate(prompt) if token in special]
    if not found:
        return ()
    (start, _), *_ = Counter(token for _, token in found).most_common(1)
    starts = [position for position, token in found if token == start]
    return tuple(sorted({*starts[1:3], *starts[1:][-3:]}))


def message_format(tokenizer: Any) -> MessageFormat | None:
    """The format of a model's messages, by the special tokens of its tokenizer; None for any other answers."""
    known = special_tokens_of(tokenizer)
    return next((format for format in (HARMONY, MUSE_SPARK) if known.keys() >= format.needed), None)


def begun_message(prompt: Sequence[int], tokenizer: Any) -> str:
    """The text of the message that a prompt has begun, without its role; "" if it has begun none."""
    start = special_tokens_of(tokenizer)[_START]
    if start not in prompt:
        return ""
    text = cast(str, tokenizer.decode(list(prompt[len(prompt) - list(prompt)[::-1].index(start) :])))
    has_ended = any(end in text for end in (*HARMONY.ends, *MUSE_SPARK.ends))
    return "" if has_ended else text.removeprefix(_ROLE)
