"""Which part of an answer is thinking: what stands between tags, by the tokenizer's account of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

from mlx_lm.tokenizer_utils import TokenizerWrapper


class ReasoningTracker:
    """A growing answer, told apart into what the model thinks and what it says.

    Attributes:
        num_tokens: that were given.
        tail: the text of those tokens that was not given; see `TokenStream.tail`.
        is_over: whether nothing more of it is given.
    """

    def __init__(self, tokenizer: TokenizerWrapper | None, prompt: Sequence[int]) -> None:
        """Nothing yet.

        Args:
            tokenizer: without one, or without tags in its vocabulary, nothing is thinking.
            prompt: token ids. Where it ends within thinking, as templates have it that begin the thinking
                themselves, the answer begins there.
        """
        self.num_tokens = 0
        self.tail = ""
        self.is_over = False
        self._start: tuple[int, ...] = ()
        self._end: tuple[int, ...] = ()
        self._tags = ("", "")
        self._is_inside = self._has_tags = False
        self._recent: list[int] = []  # since a tag was seen last
        # Where it begins, text, and whether it is thinking; a tag's own is neither, and left out of both.
        self._pieces: list[tuple[int, str, bool]] = []
        self._num_readable = 0  # characters, those included that are withheld: they may be a stop string's beginning
        self._whole: list[str] = []
        self._num_given = 0  # characters
        if tokenizer is not None and tokenizer.has_thinking:
            self._start = cast(tuple[int, ...], tokenizer.think_start_tokens)
            self._end = cast(tuple[int, ...], tokenizer.think_end_tokens)
            self._tags = (cast(str, tokenizer.think_start), cast(str, tokenizer.think_end))
            # `in` is quick, and mlx-lm's search is not.
            if self._start[0] in prompt:
                self._is_inside = tokenizer.rfind_think_start(prompt) > tokenizer.rfind_think_end(prompt)

    @property
    def text(self) -> str:
        """All of it, tags included."""
        return "".join(self._whole)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thinking, unless it is a tag."""
        return self._is_inside

    @property
    def tags(self) -> tuple[str, str]:
        """What opens and what closes thinking; both empty where the tokenizer names none."""
        return self._tags

    @property
    def has_tags(self) -> bool:
        """Whether a tag was passed."""
        return self._has_tags

    @property
    def thinking(self) -> str:
        """What stands between the tags; after the last that opens, if none closes it."""
        return self._given(is_thinking=True)

    @property
    def said(self) -> str:
        """All but thinking and tags."""
        return self._given(is_thinking=False)

    def remembered(self) -> ReasoningTracker:
        """The answer as the next turn is to know it: once it is over, with its tail, whose tokens were given."""
        if not self.is_over or not self.tail:
            return self
        whole = copy.copy(self)
        # What may begin a stop string is among the pieces already.
        num_withheld = self._num_readable - self._num_given
        whole._whole = [*self._whole, self.tail]
        whole._pieces = [*self._pieces, (self._num_readable, self.tail[num_withheld:], self._is_inside)]
        whole._num_given += len(self.tail)
        return whole

    def _given(self, *, is_thinking: bool) -> str:
        pieces = [(begin, text) for begin, text, side in self._pieces if side is is_thinking]
        return "".join(text[: max(0, self._num_given - begin)] for begin, text in pieces)

    def add(self, token: int, readable: str, given: str, tail: str = "") -> bool:
        """Take the next token.

        Args:
            token: its id.
            readable: the text that it completes.
            given: the text that is given with it: what may be the beginning of a stop string comes later, or never.
            tail: the text of the tokens so far that was not given.

        Returns: whether it belongs to thinking, tags included; of a tag of several tokens that opens, the last does.
        """
        self.num_tokens += 1
        self.tail = tail
        self._whole.append(given)
        self._num_given += len(given)
        self._pieces.append((self._num_readable, readable, self._is_inside))
        self._num_readable += len(readable)
        if not self._start:
            return False
        self._recent.append(token)
        was_inside = self._is_inside
        wanted = self._end if was_inside else self._start
        if tuple(self._recent[-len(wanted) :]) == wanted:
            self._pass(len(wanted))
        return was_inside or self._is_inside

    def _pass(self, num_tokens: int) -> None:
        """Pass the tag that the last tokens make up."""
        tag = self._tags[1 if self._is_inside else 0]
        begin = self._pieces[-num_tokens][0]
        joined = "".join(text for _, text, _ in self._pieces[-num_tokens:])
        del self._pieces[-num_tokens:]
        # With a tag may come the rest of a character before it.
        before, _, after = joined.partition(tag)
        self._pieces.append((begin, before, self._is_inside))
        self._pieces.append((begin + len(joined) - len(after), after, not self._is_inside))
        self._is_inside, self._has_tags = not self._is_inside, True
        self._recent.clear()
