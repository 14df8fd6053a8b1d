"""The limit of an answer's reasoning: how many tokens it may have, and what closes it then."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from protocol.logits_processors import LogitsProcessor
from runtime.generation.answers.message_format import FINALS
from runtime.generation.answers.message_reader import Reader
from runtime.generation.chat_template.answer_start import space_before_closing
from runtime.generation.grammar import Grammar

# The longest tag or marker has fewer.
_MAX_MARK_CHARS = 64


@attrs.define(eq=False)
class ReasoningLimit:
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
