"""Copying: drafting without a model, by what followed the same tokens before.

A text that quotes itself (a summary, an edit, code, a loop) has mostly been written before. The idea is that of LLMA
(Yang et al. 2023, arXiv 2304.04487) and of prompt lookup decoding (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding); counting occurrences is that of SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975).

Occurrences are found by comparing the whole text, which takes microseconds. An index would find them sooner, and take
ten times the memory, and time for each prompt.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

# The most tokens of a match that are compared: a longer one counts as one of this length.
MAX_MATCH = 16
# Occurrences of a match that are considered, the newest ones.
MAX_OCCURRENCES = 8

# How often the token after the only match of 1, 2, … tokens was right, counted over files of Python's standard library
# in the demo pair's tokens, each file looked up in itself; what several matches are worth was counted there, too. These
# are initial values: the calibration learns from what is accepted.
_PRIORS = (0.24, 0.42, 0.52, 0.59, 0.64, 0.68, 0.73, 0.75, 0.77, 0.79, 0.79, 0.81, 0.81, 0.82, 0.83, 0.9)
_PRIOR_OF_DISAGREEING = 0.5


@attrs.frozen
class Copied:
    """A token that followed earlier occurrences of the text's last tokens, and of the tokens copied after those.

    Attributes:
        token: the one that followed most often.
        match_length: tokens before it that occurred there: at most `MAX_MATCH` of the text, and all those copied.
        num_agreeing: how many of these occurrences the token followed, >= 1.
        num_occurrences: how many there were; at most `MAX_OCCURRENCES`.
    """

    token: int
    match_length: int
    num_agreeing: int = 1
    num_occurrences: int = 1

    @property
    def confidence(self) -> float:
        """The prior probability, in (0, 1), that the token is right if those before it are.

        It depends on the text before the copy alone, so a policy may look at it under the rejection rule.
        """
        if self.num_agreeing < self.num_occurrences:
            return _PRIOR_OF_DISAGREEING * self.num_agreeing / self.num_occurrences
        once = _PRIORS[min(self.match_length, len(_PRIORS)) - 1]
        return 1.0 - (1.0 - once) * math.pow(self.num_agreeing, -0.8)

    @property
    def kind(self) -> int:
        """Which copies it is calibrated with, in [0, 9): by the length of the match, and whether occurrences agree."""
        support = 2 if self.num_agreeing < self.num_occurrences else min(self.num_agreeing - 1, 1)
        return 3 * support + min(self.match_length, 3) - 1


class CopySearch:
    """Searches a text, which grows, for earlier occurrences of its last tokens.

    Every lookup compares the whole text, some 20 µs for each token of the match in a text of 100,000 tokens.
    """

    def __init__(self) -> None:
        self._tokens = array("I")

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        self._tokens.extend(tokens)

    def lookup(self, num_tokens: int, *, shortest: int = 1) -> Iterator[Copied]:
        """What followed most often, or else most recently, where the text's longest suffix occurred before; by token.

        If a continuation reaches the end of the text, it begins again, as if the text repeated itself.

        Args:
            num_tokens: how many tokens are wanted.
            shortest: the fewest tokens that make a match, >= 1.
        """
        length, ends = self._occurrences()
        if num_tokens < 1 or length < shortest:
            return
        pieces = [self._tokens[end : end + num_tokens] for end in ends]
        for piece in pieces:
            while len(piece) < num_tokens:
                piece.extend(piece[: num_tokens - len(piece)])
        for place in range(num_tokens):
            tokens = [piece[place] for piece in pieces]
            # The newest comes first, so that of equally frequent tokens its token is chosen.
            token = tokens[0] if len(tokens) == 1 else Counter(tokens).most_common(1)[0][0]
            yield Copied(token, length + place, tokens.count(token), len(tokens))
            if len(pieces) > 1:
                pieces = [piece for piece in pieces if piece[place] == token]

    def _occurrences(self) -> tuple[int, list[int]]:
        """The length of the longest match, at most `MAX_MATCH`, and the ends of its occurrences, newest first."""
        text = np.frombuffer(self._tokens, np.uint32)
        num_tokens, length, matches = len(text), 0, None
        # Whether the last `length` tokens also end before position `length`, `length + 1`, …, and one token more.
        longer = text[:-1] == text[-1:]
        while longer.any():
            length, matches = length + 1, longer
            if length in (MAX_MATCH, num_tokens - 1):
                break
            longer = matches[1:] & (text[: -1 - length] == text[-1 - length])
        if matches is None:
            return 0, []
        ends = np.flatnonzero(matches)[-MAX_OCCURRENCES:] + length
        return length, ends[::-1].tolist()
