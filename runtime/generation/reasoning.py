"""The reasoning of an answer: the tokens between the reasoning tags that the tokenizer names.

The server splits text instead (`runtime.generation.tool_calls.answer_reader`): here each token is marked at once, by
ids, and pieces before it may later turn out to be part of a tag, whereas text that was sent cannot be taken back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.logits_processors import LogitsProcessor
from runtime.generation.answers.message_format import FINALS, HARMONY_TAGS, MUSE_TAGS, begun_message, message_format
from runtime.generation.answers.message_reader import MessageReader, Reader
from runtime.generation.chat_template.known import opens_reasoning, space_before_closing, structural_markers, tags_of
from runtime.generation.grammar import Grammar
from runtime.generation.tool_calls.answer_reader import AnswerReader
from runtime.generation.tool_calls.call_format import CallFormat
from runtime.generation.tool_calls.events import Answer


class ReasoningMarks(TypedDict):
    """How an answer begins: the opening and the closing tag of its reasoning, and whether it begins within it."""

    tags: tuple[str, str] | None
    is_thinking: bool


NO_REASONING: ReasoningMarks = {"tags": None, "is_thinking": False}


class ReasoningTracker:
    """Splits a growing answer into reasoning and the rest, token by token."""

    tail = ""  # the text that was still withheld when the answer was over; see `TokenStream.tail`
    tags = ("", "")  # the opening and the closing tag; both empty if none are known
    begun = ""  # the text of the message that the prompt has begun
    has_tags = False  # whether the answer so far has a tag
    is_thinking = False  # whether the next token is reasoning, unless it completes a tag
    is_over = False  # whether no more tokens are given
    _num_pieces_to_tag = 0  # the pieces up to the last tag
    _has_said = False  # whether text outside of reasoning has come since then
    _start: tuple[int, ...] = ()  # ids of the tags
    _end: tuple[int, ...] = ()
    _reader: Reader | None = None  # tells the reasoning, instead of ids, where an answer has more structure than tags
    _num_readable_chars = 0  # including those withheld as a possible stop string

    def __init__(self, tokenizer: TokenizerWrapper | None, prompt: Sequence[int]) -> None:
        """An empty answer.

        Args:
            tokenizer: names the tags. Without it, or without tags in its vocabulary, nothing is reasoning.
            prompt: token ids. Some chat templates open the reasoning themselves; the answer then begins within it.
        """
        self._recent: list[int] = []  # ids since the last tag
        # Pieces of the readable text: offset, text, and whether it is reasoning; the text of tags is left out.
        self._pieces: list[tuple[int, str, bool]] = []
        self.texts: list[str] = []  # of the given tokens, possibly empty
        # The format of an answer of several messages, and markers of an answer's structure, which are part of no text.
        self.messages = None if tokenizer is None else message_format(tokenizer)
        self.dropped: tuple[str, ...] = () if tokenizer is None else structural_markers(tokenizer)
        if tokenizer is not None and self.messages is not None:
            self.begun = begun_message(prompt, tokenizer)
            self.tags = HARMONY_TAGS if self.messages.is_harmony else MUSE_TAGS
            self._reader = reader_of(self)
            self.is_thinking = self._reader.is_reasoning
        elif tokenizer is not None and (tags := tags_of(tokenizer)) is not None:
            self.tags, (self._start, self._end) = tags
            self.is_thinking = opens_reasoning(tokenizer, prompt)
        self.began_thinking = self.is_thinking  # whether it begins within the reasoning
        if self.dropped or (self.tags[0] and not self._start):
            self._reader = reader_of(self)
        # Whether anything in the answer may be reasoning, or a marker that is part of no text.
        self.has_marks = bool(self._start) or self._reader is not None

    @property
    def num_tokens(self) -> int:
        """Number of tokens given."""
        return len(self.texts)

    @property
    def text(self) -> str:
        """The whole answer, tags included."""
        return "".join(self.texts)

    @property
    def thinking(self) -> str:
        """The reasoning: the text between tags, and after an opening tag that was not closed."""
        return self._side(is_thinking=True)

    @property
    def said(self) -> str:
        """The answer without reasoning and tags."""
        return self._side(is_thinking=False)

    def remembered(self) -> ReasoningTracker:
        """The answer as the next turn sees it: once it is over, it includes the tail, whose tokens were given."""
        if not self.is_over or not self.tail:
            return self
        whole = copy.copy(self)
        whole.texts = [*self.texts, self.tail]
        if self.has_marks:
            # The pieces already include text withheld as a possible stop string.
            num_withheld = self._num_readable_chars - len(self.text)
            whole._pieces = [*self._pieces, (self._num_readable_chars, self.tail[num_withheld:], self.is_thinking)]
        return whole

    def _side(self, *, is_thinking: bool) -> str:
        if not self.has_marks:
            return "" if is_thinking else self.text
        if self._reader is not None:
            reader, answer = reader_of(self), Answer()
            answer.add(reader.add(self.text))
            if self.is_over:
                answer.add(reader.finish(is_complete=True))
            return answer.reasoning if is_thinking else answer.content
        pieces = (piece for piece in self._pieces if piece[2] is is_thinking)
        num_given = len(self.text)
        return "".join(text[: max(0, num_given - begin)] for begin, text, _ in pieces)

    def mark(self, token: int, readable: str) -> bool:
        """Read the next token of an answer with marks; `readable` is the text that it makes readable.

        Returns: whether the token is reasoning, tags included; of an opening tag with several tokens, the last one is.
        """
        self._pieces.append((self._num_readable_chars, readable, self.is_thinking))
        self._num_readable_chars += len(readable)
        if self._reader is not None:
            was_thinking = self.is_thinking
            self._reader.add(readable)
            self.is_thinking = self._reader.is_reasoning
            return was_thinking or self.is_thinking
        self._recent.append(token)
        was_thinking = self.is_thinking
        wanted = self._end if was_thinking else self._start
        if tuple(self._recent[-len(wanted) :]) == wanted and (was_thinking or self._may_reason()):
            self._pass_tag(len(wanted))
        return was_thinking or self.is_thinking

    def _may_reason(self) -> bool:
        """Whether an opening tag begins reasoning: only if no text has come since the last tag; else it is a word."""
        if not self._has_said:
            text = "".join(text for _, text, _ in self._pieces[self._num_pieces_to_tag :])
            self._has_said = bool(text.partition(self.tags[0])[0].strip())
        return not self._has_said

    def _pass_tag(self, num_tokens: int) -> None:
        """Remove the tag that the last tokens make up, and change sides."""
        tag = self.tags[1 if self.is_thinking else 0]
        begin = self._pieces[-num_tokens][0]
        joined = "".join(text for _, text, _ in self._pieces[-num_tokens:])
        del self._pieces[-num_tokens:]
        # The tag's tokens may also make text before the tag readable.
        before, _, after = joined.partition(tag)
        self._pieces.append((begin, before, self.is_thinking))
        self._pieces.append((begin + len(joined) - len(after), after, not self.is_thinking))
        self.is_thinking, self.has_tags = not self.is_thinking, True
        self._num_pieces_to_tag, self._has_said = len(self._pieces) - 1, False
        self._recent.clear()


def marks_of(answer: ReasoningTracker) -> ReasoningMarks:
    """The marks for the reader and the grammar of an answer that begins now; no tags unless both are known."""
    return {"tags": answer.tags if all(answer.tags) else None, "is_thinking": answer.began_thinking}


def reader_of(
    answer: ReasoningTracker, format: CallFormat | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> Reader:
    """A reader of a whole answer: by its messages or tags, and by the format of calls if it may have some."""
    if answer.messages is not None:
        return MessageReader(answer.messages, answer.begun, format=format, tools=tools)
    # Llama 3 may write it in front of a call, as of the tools that it was trained with.
    dropped = (*answer.dropped, "<|python_tag|>") if format is not None and format.bare == "always" else answer.dropped
    return AnswerReader(**marks_of(answer), dropped=dropped, format=format, tools=tools)


# --- the limit of an answer's reasoning -----------------------------------------------------------


# The longest tag or marker has fewer.
_MAX_MARK_CHARS = 64


@attrs.define(eq=False)
class ReasoningCounter:
    """Counts the reasoning of one answer while it is committed; see `actors.session.ReasoningLimit`.

    While the answer may still begin to reason, the tag that opens the reasoning is one more token that may follow.
    Within a call, which may end the reasoning, nothing is closed.
    """

    _tokenizer: TokenizerWrapper
    _tags: tuple[str, str]  # of the reasoning; not empty
    _reader: Reader  # of the answer, of which nothing was read; used by this object alone
    _num_read: int  # tokens of the text, beginning with those of the prompt
    _num_left: int  # the most tokens of reasoning that may follow, >= 0, without its tags
    _tail: str = ""  # of the text that was read
    _has_said: bool = False
    _has_closed: bool = False

    def end(self) -> None:
        """Allow no more reasoning."""
        self._num_left = 0

    def follow(self, committed: Sequence[int]) -> None:
        """Read the text so far; a long part of it at once if its tokens need not be counted."""
        new = committed[self._num_read :]
        self._num_read += len(new)
        for some in [new] if self._num_left == 0 and new else [[token] for token in new]:
            was_reasoning, text = self._reader.is_reasoning, self._tokenizer.decode(some)
            self._tail = (self._tail + text)[-_MAX_MARK_CHARS:]
            for delta in self._reader.add(text):
                if delta.kind != "reasoning":
                    self._has_said = delta.kind == "content" and (self._has_said or bool(delta.text.strip()))
            if was_reasoning and self._reader.is_reasoning:
                self._num_left = max(0, self._num_left - len(some))

    def excluded_by(self, processors: Iterable[LogitsProcessor]) -> Grammar | None:
        """The grammar with no place for the tag that closes the reasoning, within which the answer begins, neither at
        the beginning nor after some words; None without one.
        """
        for processor in processors if self._reader.is_reasoning else ():
            if isinstance(processor, Grammar):
                endings = (self._encoded(words + self._closing_text) for words in ("", "Well."))
                if not any(map(processor.allows, endings)):
                    return processor
        return None

    @property
    def num_left(self) -> int | None:
        """Tokens that may follow before the reasoning is to be closed, >= 0; None for any number."""
        if self._reader.is_reasoning:
            return max(1, self._num_left) if self._reader.is_in_block else self._num_left
        return None if self._has_said else self._num_left + 1

    def num_to_judge(self, drafted: Sequence[int], num_certain: int, num_closing: int = 0) -> int:
        """See `actors.session.ReasoningLimit`."""
        if num_closing > 0:
            return max(num_closing, min(self._num_before(drafted, (self._reader.opening,)), num_certain))
        if self._reader.is_reasoning:
            return max(0, (self.num_left or 0) - 1)
        if self._has_said:
            return len(drafted)
        num_before = self._num_before(drafted, (self._reader.opening,))
        if self._num_left > 0:
            return num_before + self._num_left
        ends = self._reader.ends_of_block
        num_in_block = 1 + self._num_before(drafted, ends) if ends else 0
        return max(num_in_block, min(num_before, num_certain))

    def _num_before(self, drafted: Sequence[int], marks: Sequence[str]) -> int:
        """How many drafted tokens come before the one that completes a mark in the text; all if none does."""

        def is_complete(text: str) -> bool:
            begins = ((mark, max(0, len(self._tail) - len(mark) + 1)) for mark in marks if mark)
            return any(text.find(mark, begin) >= 0 for mark, begin in begins)

        text = self._tail
        if is_complete(text + self._tokenizer.decode(list(drafted))):
            for index, token in enumerate(drafted):
                text += self._tokenizer.decode([token])
                if is_complete(text):
                    return index
        return len(drafted)

    def closing(self, committed: Sequence[int]) -> tuple[int, ...]:
        """The tokens that close the reasoning, without those with which the text ends already.

        An answer of several messages that reasons again gets the header of its content, too.
        """
        text = self._closing_text
        if self._has_closed:
            text += FINALS.get(self._tags, "")
        self._has_closed = True
        ids = self._encoded(text)
        lengths = range(min(len(ids) - 1, len(committed)), 0, -1)
        written = next((n for n in lengths if tuple(committed[-n:]) == ids[:n]), 0)
        return ids[written:]

    @property
    def _closing_text(self) -> str:
        return space_before_closing(self._tokenizer) + self._tags[1]

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
