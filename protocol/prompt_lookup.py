"""Prompt lookup: drafting without a model, by what followed the same tokens earlier in the text.

Much of a text that quotes itself (a summary, an edit, code with its names, a loop) has been written before. The longest
suffix that occurred earlier is looked up, and the tokens that followed it there are proposed. The idea is that of LLMA
(Yang et al. 2023, arXiv 2304.04487), which copies spans from reference documents, and of prompt lookup decoding (Saxena
2023, github.com/apoorvumang/prompt-lookup-decoding), which takes the prompt as the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from protocol.errors import ProtocolError

# Lengths of the n-grams that are matched, in tokens.
MAX_NGRAM = 16
MIN_NGRAM = 1

# How often the token after a match of 1, 2, … tokens was right, counted over files of Python's standard library, each
# of them looked up in itself. These are initial values: the calibration learns from what is accepted.
_PRIORS = (0.23, 0.47, 0.61, 0.64, 0.68, 0.72, 0.75, 0.77, 0.81, 0.84, 0.86, 0.87, 0.88, 0.89, 0.9, 0.91)


def prior(match_length: int) -> float:
    """The probability, in (0, 1), that the token after a match is right, before anything is known of the text.

    Args:
        match_length: tokens that agree, >= 1.
    """
    return _PRIORS[min(match_length, len(_PRIORS)) - 1]


@attrs.frozen
class Found:
    """The tokens that followed the text's last tokens where those occurred before.

    Attributes:
        tokens: the continuation, at least one.
        match_length: how many of the last tokens occurred before, in this order; at most the longest n-gram.
    """

    tokens: tuple[int, ...]
    match_length: int

    @property
    def confidences(self) -> tuple[float, ...]:
        """For each token, the probability that it is right if those before it are.

        If those before it are right, the match is longer by as many tokens. (The counts confirm this: the second token
        after a match of one is right as often as the first after a match of two.)

        The confidences and the tokens depend on the text before them alone, so a policy may look at both under the
        rejection rule.
        """
        return tuple(prior(self.match_length + i) for i in range(len(self.tokens)))


class PromptLookup:
    """An index over one text, the prompt and the tokens committed after it, which grows with the text.

    A reference can come before the text: tokens that the text may quote without containing them.

    It maps each n-gram to the position where it ended last. An n-gram longer than the shortest is entered only once its
    last n - 1 tokens have occurred a second time: until then, the tokens before them can be read from the text. So
    n-grams that occur once cost one entry for all n together, and a token costs at most two entries for each n, in
    memory and in time.
    """

    def __init__(self, *, longest: int = MAX_NGRAM, shortest: int = MIN_NGRAM) -> None:
        """Make an index over the empty text.

        Args:
            longest: the most tokens that are matched, >= shortest.
            shortest: the fewest tokens that make a match, >= 1.

        Raises: ProtocolError: the bounds exclude everything.
        """
        if not 1 <= shortest <= longest:
            raise ProtocolError(f"shortest and longest must be 1 <= shortest <= longest, got {shortest} and {longest}")
        self._longest = longest
        self._shortest = shortest
        self._text: list[int] = []  # the reference, and then the text
        self.num_reference = 0  # tokens of the reference
        self._ends: dict[tuple[int, ...], int] = {}  # by n-gram: the position after its last occurrence

    def __len__(self) -> int:
        """Tokens of the text, without the reference."""
        return len(self._text) - self.num_reference

    def append_reference(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the reference; only while the text is empty."""
        if len(self):
            raise ProtocolError(f"a reference comes before the text, which has {len(self)} tokens already")
        self.append(tokens)
        self.num_reference += len(tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end of the text."""
        for token in tokens:
            # Only now is it known what follows the n-grams that end here.
            self._enter(len(self._text))
            self._text.append(token)

    def lookup(self, beyond: Sequence[int] = (), *, num_tokens: int) -> Found | None:
        """What followed the last occurrence of the longest n-gram at the end of the text that occurred before.

        If the continuation reaches the end of the text, it goes on with its own tokens, as a text does that repeats
        itself.

        Args:
            beyond: tokens to take as following the text; they are not searched themselves.
            num_tokens: how many tokens are wanted.

        Returns: as many tokens as are wanted; None if nothing was found, or none are wanted.
        """
        if num_tokens < 1:
            return None
        length, end = self._longest_match((*self._text[-self._longest :], *beyond[-self._longest :]))
        if length == 0:
            return None
        after = list(beyond)
        for source in range(end, end + num_tokens):
            after.append(self._text[source] if source < len(self._text) else after[source - len(self._text)])
        return Found(tuple(after[len(beyond) :]), length)

    def _enter(self, end: int) -> None:
        """Enter the n-grams that end before a position into the index."""
        for n in range(self._shortest, min(self._longest, end) + 1):
            ngram = self._ngram(n, end)
            earlier = self._ends.get(ngram)
            self._ends[ngram] = end
            if earlier is None:
                return
            # The second occurrence: from now on longer n-grams are searched, so the first one must be in the index.
            if n < min(self._longest, earlier):
                self._ends.setdefault(self._ngram(n + 1, earlier), earlier)

    def _longest_match(self, tail: tuple[int, ...]) -> tuple[int, int]:
        """(length, last end) of the longest n-gram at the end of `tail` that is in the text; (0, 0) if none is."""
        max_length = min(self._longest, len(tail))
        length = end = 0
        for n in range(self._shortest, max_length + 1):
            found = self._ends.get(tail[-n:])
            if found is None:
                break
            length, end = n, found
        # An n-gram that occurred once stands for the longer ones that end with it: compare the tokens before it.
        while 0 < length < min(max_length, end) and self._text[end - length - 1] == tail[-length - 1]:
            length += 1
        return length, end

    def _ngram(self, n: int, end: int) -> tuple[int, ...]:
        return tuple(self._text[end - n : end])
