"""Copying: drafting without a model, by what followed the same tokens before.

A text that quotes itself (a summary, an edit, code, a loop) has mostly been written before. The idea is that of LLMA
(Yang et al. 2023, arXiv 2304.04487) and of prompt lookup decoding (Saxena 2023,
github.com/apoorvumang/prompt-lookup-decoding); counting occurrences is that of SuffixDecoding (Oliaro et al. 2024,
arXiv 2411.04975).

The index is a hash table with chains, as in LZ77 compressors, for n-grams of a few lengths. A suffix automaton finds
matches of any length, but in Python it takes ten times the memory and more time, and counts nothing by itself.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs

from protocol.errors import ProtocolError

# Lengths of the n-grams that have a chain each, in tokens. A longer match is found in the chain of the longest.
LENGTHS = (1, 2, 4, 8)
# The most tokens of a match that are compared: a longer one counts as one of this length.
MAX_MATCH = 16
# Occurrences of an n-gram that are compared, newest first; and entries of a chain that are read for them.
MAX_OCCURRENCES, MAX_ENTRIES = 8, 64
# Stands between the texts of one index; no token has this id.
SEPARATOR = 2**32 - 1
# Slots of a table at first, and tokens that are added at a time; a power of two.
MIN_SLOTS = 256

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


# (a text, how many tokens are wanted, the fewest tokens that make a match) → what followed the text's end elsewhere.
FindCopy = Callable[[Sequence[int], int, int], Iterator[Copied]]


class CopyIndex:
    """An index over one text, which grows with it. A reference may come before the text: tokens that it may quote.

    A token takes constant time, and 36 to 56 bytes.
    """

    def __init__(self) -> None:
        self._tokens = array("I")  # the reference, and then the text
        self.num_reference = 0  # tokens of the reference
        # By slot: the position after the last n-gram with that hash, or 0; by position: the one before it in the chain.
        self._last = [array("I", bytes(4 * MIN_SLOTS)) for _ in LENGTHS]
        self._earlier = [array("I") for _ in LENGTHS]

    def __len__(self) -> int:
        """Tokens of the text, without the reference."""
        return len(self._tokens) - self.num_reference

    @property
    def num_bytes(self) -> int:
        """What its arrays take."""
        return sum(map(sys.getsizeof, (self._tokens, *self._last, *self._earlier)))

    def append_reference(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the reference; only while the text is empty."""
        if len(self):
            raise ProtocolError(f"a reference comes before the text, which has {len(self)} tokens already")
        self.append(tokens)
        self.num_reference += len(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end of the text."""
        text = self._tokens
        for begin in range(0, len(tokens), MIN_SLOTS):
            piece = array("I", tokens[begin : begin + MIN_SLOTS])
            if len(text) + len(piece) > len(self._last[0]):
                # Earlier n-grams are found in both halves from now on; those that do not belong are passed over.
                self._last = [slots + slots for slots in self._last]
            self._enter(piece)
            text += piece

    def _enter(self, tokens: array[int]) -> None:
        """Enter the n-grams that end before each of some further tokens: only now is it known what follows them."""
        (last1, last2, last4, last8), mask = self._last, len(self._last[0]) - 1
        add1, add2, add4, add8 = (earlier.append for earlier in self._earlier)
        end = len(self._tokens)
        t8, t7, t6, t5, t4, t3, t2, t1 = _padded(self._tokens[-8:])
        for token in tokens:
            # A shorter n-gram's hash is part of a longer one's. The padding before the beginning occurs in no text.
            slot = t1 & mask
            add1(last1[slot])
            last1[slot] = end
            slot = (hash2 := hash((t2, t1))) & mask
            add2(last2[slot])
            last2[slot] = end
            slot = (hash4 := hash((t4, t3, hash2))) & mask
            add4(last4[slot])
            last4[slot] = end
            slot = hash((t8, t7, t6, t5, hash4)) & mask
            add8(last8[slot])
            last8[slot] = end
            t8, t7, t6, t5, t4, t3, t2, t1 = t7, t6, t5, t4, t3, t2, t1, token
            end += 1

    def lookup(self, num_tokens: int, *, shortest: int = 1, suffix: array[int] | None = None) -> Iterator[Copied]:
        """What followed most often, or else most recently, where the text's longest suffix occurred before; by token.

        If a continuation reaches the end of the text, it begins again, as if the text repeated itself.

        Args:
            num_tokens: how many tokens are wanted.
            shortest: the fewest tokens that make a match, >= 1.
            suffix: the last `MAX_MATCH` tokens of another text, which is looked up in this one; None for this one's. A
                continuation then ends with the text, or at a `SEPARATOR`.
        """
        text = self._tokens
        length, ends = self._occurrences(text[-MAX_MATCH:] if suffix is None else suffix, shortest)
        if num_tokens < 1 or length < shortest:
            return
        pieces = [text[end : end + num_tokens] for end in ends]
        for piece in pieces:
            while len(piece) < num_tokens:
                piece.extend(piece[: num_tokens - len(piece)] if suffix is None else (SEPARATOR,))
        for place in range(num_tokens):
            tokens = [piece[place] for piece in pieces]
            # The newest comes first, so that of equally frequent tokens its token is chosen.
            token = tokens[0] if len(tokens) == 1 else Counter(tokens).most_common(1)[0][0]
            if token == SEPARATOR:
                return
            yield Copied(token, length + place, tokens.count(token), len(tokens))
            if len(pieces) > 1:
                pieces = [piece for piece in pieces if piece[place] == token]

    def _occurrences(self, suffix: array[int], shortest: int) -> tuple[int, list[int]]:
        """The length of the longest match, and its ends, newest first; may be (0, []) if it is below `shortest`."""
        text, mask = self._tokens, len(self._last[0]) - 1
        t8, t7, t6, t5, t4, t3, t2, t1 = _padded(suffix[-8:])
        hash4 = hash((t4, t3, hash2 := hash((t2, t1))))
        hashes, next_length = (t1, hash2, hash4, hash((t8, t7, t6, t5, hash4))), MAX_MATCH + 1
        for length, hash_, last, earlier in reversed(
            list(zip(LENGTHS, hashes, self._last, self._earlier, strict=True))
        ):
            if next_length <= shortest:  # a match that long would be in the chain of longer n-grams
                break
            next_length = length
            if length > len(suffix):
                continue
            wanted, ends, end, num_read = suffix[-length:], list[int](), last[hash_ & mask], 0
            while end > 0 and num_read < MAX_ENTRIES and len(ends) < MAX_OCCURRENCES:
                if end >= length and text[end - length : end] == wanted:
                    ends.append(end)
                end, num_read = earlier[end], num_read + 1
            if ends:
                lengths = [self._match_length(end, length, suffix) for end in ends]
                longest = max(lengths)
                return longest, [end for end, each in zip(ends, lengths, strict=True) if each == longest]
        return 0, []

    def _match_length(self, end: int, length: int, suffix: array[int]) -> int:
        text, most = self._tokens, min(len(suffix), end)
        while length < most and text[end - length - 1] == suffix[-length - 1]:
            length += 1
        return length


def _padded(tokens: array[int]) -> list[int]:
    return [-1] * (8 - len(tokens)) + tokens.tolist()
