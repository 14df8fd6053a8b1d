"""The search for copies: what followed the last tokens of a sequence where they occurred before.

The whole sequence is compared, which takes microseconds. An index would take ten times the memory.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from protocol.copying import MAX_MATCH, Copied

MAX_OCCURRENCES = 8  # occurrences of a match that are considered, the newest ones


class CopySearch:
    """Searches a growing text for its last tokens: some 20 µs for each token of the match in 100,000 tokens."""

    def __init__(self) -> None:
        self._tokens = array("I")

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        self._tokens.extend(tokens)

    def lookup(self, num_tokens: int, beyond: Sequence[int] = (), *, shortest: int = 1) -> Iterator[Copied]:
        """What followed most often, or else last, where the text's longest suffix occurred before; by token.

        Drafted tokens `beyond` count as the text's end. A match has at least `shortest` tokens. A continuation that
        reaches the end begins again, as if the text repeated itself.
        """
        self._tokens.extend(beyond)
        length, ends = self._occurrences()
        pieces = [self._tokens[end : end + num_tokens] for end in ends]
        del self._tokens[len(self._tokens) - len(beyond) :]
        if num_tokens < 1 or length < shortest:
            return
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
