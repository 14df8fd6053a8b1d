"""One text of a drafter that predicts a block of tokens in one pass.

A block begins with a token of the text, its anchor, and reads the features of all positions before. What its pass
computes for a position after the anchor does not depend on the tokens between. So the tokens after a text are drafted
by one pass, whose anchor is the last token that the target has committed, and read one by one; some kinds correct each
by the token before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from actors.trained.trained_sequence import LedgerSequence


@attrs.frozen
class Block:
    """What the pass of a block gave.

    Attributes:
        position: of the anchor.
        anchor: its id.
        logits: (num_foreseen, its vocabulary), lazy.
        hidden: (num_foreseen, width), lazy.
    """

    position: int
    anchor: int
    logits: mx.array
    hidden: mx.array


class BlockReader(Protocol):
    """A drafter's forward passes.

    Attributes:
        vocab_size: width of its logits: the target's.
        feature_width: width of a position's features.
        num_foreseen: tokens that a block predicts, >= 1.
    """

    vocab_size: int
    feature_width: int
    num_foreseen: int

    def make_cache(self) -> list[Any]:
        """Empty caches of mlx-lm's `KVCache`, for the keys and values of features."""
        ...

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        """Add features to the caches.

        Args:
            features: (n, width) of the positions from `position` on, which come after those in the caches.
        """
        ...

    def read_block(self, anchor: int, position: int, cache: list[Any], num_context: int) -> Block:
        """Run the pass of a block.

        Args:
            anchor: its id.
            position: its position.
            cache: see `read_context`.
            num_context: how many of the positions in the caches come before the anchor, >= 1.
        """
        ...

    def acceptance_after(self, block: Block, tokens: Sequence[int], num_rows: int) -> mx.array | None:
        """See `FeatureInput.acceptance`; of the tokens of `read_after`."""
        ...

    def read_after(self, block: Block, tokens: Sequence[int], num_rows: int) -> mx.array:
        """The logits after tokens of a block.

        Args:
            block: its pass.
            tokens: the anchor and those after it, at most `num_foreseen`.
            num_rows: after how many of them, the last ones.

        Returns: (num_rows, V), lazy.
        """
        ...


class BlockSequence(LedgerSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: BlockReader) -> None:
        """Make an empty sequence."""
        super().__init__(reader.feature_width)
        self._reader = reader
        # Keys and values of the features of positions from `_begin` to `_end`.
        self._cache = reader.make_cache()
        self._begin = self._end = 0
        self._block: Block | None = None

    @property
    def staleness(self) -> int:
        """What a block lacks are the features of the positions after its anchor."""
        return max(0, len(self._tokens) - 1 - self._end)

    @property
    def foreseen(self) -> int:
        return self._num_given + 1 + self._reader.num_foreseen

    def close(self) -> None:
        super().close()
        self._cache, self._block = [], None
        self._begin = self._end = 0

    @property
    def num_bytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self._cache)

    def reuse(self, length: int) -> None:
        """Features of what the texts do not share were of the other text."""
        super().reuse(length)
        end = max(self._begin, min(self._end, self._num_common))
        for layer in self._cache:
            layer.trim(self._end - end)
        self._num_given = self._end = end
        self._block = None

    # --- blocks -----------------------------------------------------------------------------------

    def _logits(self, num_tokens: int) -> mx.array:
        parts, estimates = list[mx.array](), list[mx.array | None]()
        while num_tokens <= len(self._tokens):
            block = self._block_for(num_tokens)
            index = 0 if block is None else num_tokens - 1 - block.position
            part, estimate = mx.zeros((1, self._reader.vocab_size)), None
            if block is not None and index < self._reader.num_foreseen:
                end = min(index + len(self._tokens) - num_tokens + 1, self._reader.num_foreseen)
                read = block, self._tokens[block.position : block.position + end], end - index
                part, estimate = self._reader.read_after(*read), self._reader.acceptance_after(*read)
            parts.append(part)
            estimates.append(estimate)
            num_tokens += part.shape[0]
        of_rows = [mx.zeros(part.shape[0]) if e is None else e for part, e in zip(parts, estimates, strict=True)]
        self.acceptance = None if all(e is None for e in estimates) else mx.concatenate(of_rows)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _block_for(self, num_tokens: int) -> Block | None:
        """The block that predicts the token after the first `num_tokens`; None if no features come before it."""
        position = min(num_tokens - 1, self._end)
        if position <= self._begin:
            return None
        last = self._block
        if last is not None and self._tokens[last.position : last.position + 1] == [last.anchor]:
            # Before the last position with features, blocks follow each other without overlap, as in drafting: a block
            # is used for all tokens that it predicts. After that position, a block must begin there.
            follows = 0 <= num_tokens - 1 - last.position < self._reader.num_foreseen
            if last.position == position or (position < self._end and follows):
                return last
        anchor = self._tokens[position]
        self._block = self._reader.read_block(anchor, position, self._cache, position - self._begin)
        return self._block

    def _look_at_arrived(self) -> None:
        if self._arrived:
            super()._look_at_arrived()
            # The features are kept no longer.
            mx.eval([(layer.keys, layer.values) for layer in self._cache])

    def _look_at(self, start: int, features: mx.array) -> None:
        """Make keys and values of features."""
        if start > self._end or self._begin == self._end:
            # Features between are missing: what comes after them is worth more than what is before.
            self._cache, self._begin, self._end, self._block = self._reader.make_cache(), start, start, None
        # Some may come a second time, if the target has lost its cache.
        known = self._end - start
        if known < features.shape[0]:
            self._reader.read_context(features[known:], self._end, self._cache)
            self._end = start + features.shape[0]
