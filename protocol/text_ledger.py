"""The text ledger: what one rank of a sharded target has fed to each sequence, to notice a rank that is out of step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import cast

import attrs
import mlx.core as mx

from protocol.rank_messages import TextEntry


@attrs.define(eq=False)
class _Text:
    checksums: list[int] = attrs.field(factory=lambda: [0])  # of the first 0, 1, 2, … tokens
    pending: list[mx.array] = attrs.field(factory=list)  # the tokens after those, (1,) each; may not be computed yet

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.checksums.append(zlib.crc32(token.to_bytes(8, "little", signed=True), self.checksums[-1]))

    @property
    def length(self) -> int:
        return len(self.checksums) - 1 + len(self.pending)


class TextLedger:
    """Which tokens a rank has fed to each sequence of a sharded target, by its number, as a running checksum.

    Rank 0 sends its entries with each pass; a rank that is out of step is noticed before its part is used.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def open(self, sequence: int) -> None:
        """Begin an empty text."""
        self._texts[sequence] = _Text()

    def copy(self, sequence: int, other: int) -> None:
        """Begin another text with the same tokens."""
        self._texts[other] = _Text(list(self._settled(sequence).checksums))

    def close(self, sequence: int) -> None:
        """Forget a text."""
        del self._texts[sequence]

    def feed(self, sequence: int, tokens: Sequence[int]) -> None:
        """Add tokens to a text."""
        self._settled(sequence).add(tokens)

    def feed_later(self, sequence: int, token: mx.array) -> None:
        """Add a token that may not be computed yet, (1,); it is read when the text is looked at next."""
        self._settled(sequence).pending.append(token)

    def cut(self, sequence: int, length: int) -> None:
        """Drop a text's tokens from a length on."""
        if length < self._texts[sequence].length:
            del self._settled(sequence).checksums[length + 1 :]

    def entry(self, sequence: int) -> TextEntry:
        """The text of a sequence."""
        text = self._settled(sequence)
        return TextEntry(sequence, text.length, text.checksums[-1])

    def _settled(self, sequence: int) -> _Text:
        """A text without pending tokens, which waits until they are computed."""
        text = self._texts[sequence]
        pending, text.pending = text.pending, []
        text.add([cast(int, token.item()) for token in pending])
        return text
