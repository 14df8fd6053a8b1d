"""Prompt lookup: what came after the same words earlier in the text, as a draft.

A text that quotes itself (a summary, an edit, code with its names, a loop) has mostly been written before. The
longest suffix of it that occurred earlier is looked up, and what came after it there is proposed; no model is
needed. The idea is that of LLMA (Yang et al. 2023, arXiv 2304.04487), which copies spans from reference documents,
and of prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding), which takes the prompt
for the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from protocol.errors import ProtocolError

LONGEST = 16
SHORTEST = 1

# How often the token after a match of 1, 2, … tokens was right, counted over files of Python's standard library, each
# of them looked up in itself. A start only: what is accepted is counted as it goes.
_PRIORS = (0.23, 0.47, 0.61, 0.64, 0.68, 0.72, 0.75, 0.77, 0.81, 0.84, 0.86, 0.87, 0.88, 0.89, 0.9, 0.91)


def prior(match_length: int) -> float:
    """How likely the token after a match is the right one, in (0, 1), before anything is known of the text.

    Args:
        match_length: tokens that agree, >= 1.
    """
    return _PRIORS[min(match_length, len(_PRIORS)) - 1]


@attrs.frozen
class Found:
    """What came after the text's last tokens when they occurred before.

    Attributes:
        tokens: the continuation, one at least.
        match_length: how many of the last tokens occurred before, in this order; no more than was looked for.
    """

    tokens: tuple[int, ...]
    match_length: int

    @property
    def confidences(self) -> tuple[float, ...]:
        """For each token, how likely it is right if those before it are.

        If they are, the text agrees with what it copies over so many tokens more: the match is that much longer (and
        so it was counted: the second token after a match of one is right as often as the first after a match of two).

        These hang on the text before a token alone, and so does the token: under the rejection rule a policy may
        look at both.
        """
        return tuple(prior(self.match_length + i) for i in range(len(self.tokens)))


class PromptLookup:
    """An index over one text, the prompt and what was committed after it, that grows with the text.

    Where an n-gram ended last is kept by the n-gram. An n-gram that is longer than the shortest is only entered
    once its last n - 1 tokens have occurred a second time: until then, what lay before them can be read from
    the text. So what occurs once costs one entry, whatever n may be, and a token costs two for each n at most, in
    memory and in time.
    """

    def __init__(self, *, longest: int = LONGEST, shortest: int = SHORTEST) -> None:
        """An index over no text.

        Args:
            longest: most tokens that are matched; more tell no more.
            shortest: fewest tokens that make a match, >= 1.

        Raises: ProtocolError: the bounds exclude everything.
        """
        if not 1 <= shortest <= longest:
            raise ProtocolError(f"n-grams of {shortest} to {longest} tokens are none; use 1 <= shortest <= longest")
        self._longest = longest
        self._shortest = shortest
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # tokens of the text up to the n-gram's last end

    def __len__(self) -> int:
        return len(self._text)

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        for token in tokens:
            # Only now is there something to say of what comes after the n-grams that end here.
            self._enter(len(self._text))
            self._text.append(token)

    def lookup(self, beyond: Sequence[int] = (), *, most: int) -> Found | None:
        """What came after the longest of the last n-grams that occurred before, the last time that it did.

        Where that leads to the end of the text, it goes on with what it has found itself, as a text does that
        repeats itself.

        Args:
            beyond: tokens to be taken as following the text; they are not searched themselves.
            most: tokens wanted.

        Returns: as many tokens as are wanted; None where nothing was found, or none are wanted.
        """
        if most < 1:
            return None
        length, end = self._longest_match((*self._text[-self._longest :], *beyond[-self._longest :]))
        if length == 0:
            return None
        after = list(beyond)
        for source in range(end, end + most):
            after.append(self._text[source] if source < len(self._text) else after[source - len(self._text)])
        return Found(tuple(after[len(beyond) :]), length)

    def _enter(self, end: int) -> None:
        """Enter the n-grams that end before a position."""
        for n in range(self._shortest, min(self._longest, end) + 1):
            ngram = self._ngram(n, end)
            earlier = self._ends.get(ngram)
            self._ends[ngram] = end
            if earlier is None:
                return
            # The second time: now the longer ones are looked for, so the first of them must be there to be found.
            if n < min(self._longest, earlier):
                self._ends.setdefault(self._ngram(n + 1, earlier), earlier)

    def _longest_match(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """Length and last end of the longest n-gram at the end of `tail` that is in the text; (0, 0) for none."""
        most = min(self._longest, len(tail))
        length = end = 0
        for n in range(self._shortest, most + 1):
            found = self._ends.get(tail[-n:])
            if found is None:
                break
            length, end = n, found
        # One that occurred once is all that was entered of the longer ones that it ends.
        while 0 < length < min(most, end) and self._text[end - length - 1] == tail[-length - 1]:
            length += 1
        return length, end

    def _ngram(self, n: int, end: int) -> tuple[int, ...]:
        return tuple(self._text[end - n : end])
