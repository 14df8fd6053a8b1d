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

from actors.trained.context_sequence import ContextReader, ContextSequence


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


class BlockReader(ContextReader, Protocol):
    """A drafter's forward passes.

    Attributes:
        num_foreseen: tokens that a block predicts, >= 1.
    """

    num_foreseen: int

    def read_block(self, anchor: int, position: int, cache: list[Any], num_context: int) -> Block:
        """Run the pass of a block whose anchor, an id, is at a position, on the first `num_context` in the caches."""
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


class BlockSequence(ContextSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: BlockReader) -> None:
        super().__init__(reader)
        self._reader = reader
        self._block: Block | None = None
        # By part of the logits of a feed: its number of rows, and the estimates for them.
        self._estimates: list[tuple[int, mx.array | None]] = []

    @property
    def foreseen(self) -> int:
        return self._num_given + 1 + self._reader.num_foreseen

    def _drop_drafts(self) -> None:
        self._block = None

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self._estimates.clear()
        logits = super().feed(tokens, num_logits)
        has_estimates = any(estimate is not None for _, estimate in self._estimates)
        of_rows = [mx.zeros(num_rows) if given is None else given for num_rows, given in self._estimates]
        self.acceptance = mx.concatenate(of_rows) if has_estimates else None
        return logits

    def _logits(self, position: int) -> mx.array:
        block = self._block_for(position)
        index = 0 if block is None else position - block.position
        if block is None or index >= self._reader.num_foreseen:
            self._estimates.append((1, None))
            return mx.zeros((1, self._reader.vocab_size))
        end = min(index + len(self._tokens) - position, self._reader.num_foreseen)
        read = block, self._tokens[block.position : block.position + end], end - index
        self._estimates.append((end - index, self._reader.acceptance_after(*read)))
        return self._reader.read_after(*read)

    def _block_for(self, position: int) -> Block | None:
        """The block that predicts the token after that at a position; None if no features come before it."""
        begin = min(position, self._end)
        if begin <= self._begin:
            return None
        last = self._block
        if last is not None and self._tokens[last.position : last.position + 1] == [last.anchor]:
            # Before the last position with features, blocks follow each other without overlap, as in drafting: a block
            # is used for all tokens that it predicts. After that position, a block must begin there.
            follows = 0 <= position - last.position < self._reader.num_foreseen
            if last.position == begin or (begin < self._end and follows):
                return last
        self._block = self._reader.read_block(self._tokens[begin], begin, self._cache, begin - self._begin)
        return self._block
