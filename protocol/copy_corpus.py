"""The corpus of copies: earlier texts that later ones may be drafted from, kept apart by owner, and bounded in bytes.

Texts of one owner share an index of up to an eighth of the bound, and are dropped together. So a lookup has few indices
to ask.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import attrs

from protocol.copying import MAX_MATCH, MIN_SLOTS, SEPARATOR, Copied, CopyIndex

# The owner whose texts every other owner may copy from, too.
EVERYBODY = b""
# Tokens that are added without a pause: a millisecond or two.
TOKENS_AT_ONCE = 256
# Bytes of an index beside its arrays; and the most for each token of a full index.
_BYTES_OF_INDEX, _BYTES_OF_TOKEN = 1024, 40
_SHARE = 8


@attrs.define(eq=False, repr=False)
class _Segment:
    """Texts of one owner that are dropped together."""

    owner: bytes
    index: CopyIndex = attrs.field(factory=CopyIndex)
    num_bytes: int = 0


class CopyCorpus:
    """Texts of several owners; the least recently used go first.

    Attributes:
        max_bytes: the bound, the indices included, >= 0.
        num_bytes: the bytes in use.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        # A power of two, so that the tables of a full index, which have as many slots, are full, too.
        num_tokens = max(MIN_SLOTS, max_bytes // (_SHARE * _BYTES_OF_TOKEN))
        self._max_tokens = 1 << (num_tokens.bit_length() - 1)
        self._by_use: OrderedDict[_Segment, None] = OrderedDict()  # the least recently used first
        self._by_owner: dict[bytes, list[_Segment]] = {}  # in the order in which they were begun

    def add(self, tokens: Sequence[int], owner: bytes) -> Iterator[None]:
        """Add a text, with a pause after every `TOKENS_AT_ONCE` tokens. One text is added at a time."""
        step = min(TOKENS_AT_ONCE, self._max_tokens - 1)
        for begin in range(0, len(tokens), step):
            piece = tokens[begin : begin + step]
            segments = self._by_owner.setdefault(owner, [])
            if not segments or len(segments[-1].index) + 1 + len(piece) > self._max_tokens:
                segments.append(_Segment(owner))
            segment = segments[-1]
            if begin == 0:
                segment.index.append((SEPARATOR,))
            segment.index.append(piece)
            self._by_use[segment] = None
            self._by_use.move_to_end(segment)
            before, segment.num_bytes = segment.num_bytes, segment.index.num_bytes + _BYTES_OF_INDEX
            self.num_bytes += segment.num_bytes - before
            while self.num_bytes > self.max_bytes:
                self._drop(self._by_use.popitem(last=False)[0])
            yield

    def _drop(self, segment: _Segment) -> None:
        self.num_bytes -= segment.num_bytes
        segments = self._by_owner[segment.owner]
        segments.remove(segment)
        if not segments:
            del self._by_owner[segment.owner]

    def lookup(self, owner: bytes, text: Sequence[int], num_tokens: int, shortest: int) -> Iterator[Copied]:
        """What followed most often where a text's longest suffix occurs, in texts of an owner or of everybody.

        Of equally long matches, the one in the owner's newest segment is taken. See `CopyIndex.lookup`.
        """
        suffix = array("I", text[-MAX_MATCH:])
        best: tuple[Copied, Iterator[Copied], _Segment] | None = None
        for each in dict.fromkeys((owner, EVERYBODY)):
            for segment in reversed(self._by_owner.get(each, ())):
                found = segment.index.lookup(num_tokens, shortest=shortest, suffix=suffix)
                if (first := next(found, None)) is not None:
                    best, shortest = (first, found, segment), first.match_length + 1
        if best is None:
            return
        first, found, segment = best
        self._by_use.move_to_end(segment)
        yield first
        yield from found
