"""One text of a drafter that predicts a block of tokens in one pass.

A block begins with a token of the text, its anchor, and reads the features of all positions before. What its pass
computes for a position after the anchor does not depend on the tokens between. So the tokens after a text are drafted
by one pass, whose anchor is the last token that the target has committed, and read one by one; some kinds correct each
by the token before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from actors.mlx.sequence_state import SequenceState
from actors.trained.trained_sequence import TrainedSequence, check_state, put_layers, taken_layers
from protocol.errors import RewindError


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

    def read_after(self, block: Block, tokens: Sequence[int], num_rows: int) -> mx.array:
        """The logits after tokens of a block.

        Args:
            block: its pass.
            tokens: the anchor and those after it, at most `num_foreseen`.
            num_rows: after how many of them, the last ones.

        Returns: (num_rows, V), lazy.
        """
        ...


class BlockSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: BlockReader) -> None:
        """Make an empty sequence."""
        super().__init__(reader.feature_width)
        self._reader = reader
        self._tokens: list[int] = []
        # Keys and values of the features of positions from `_begin` to `_end`.
        self._cache = reader.make_cache()
        self._begin = self._end = 0
        # Features that were given and not read yet.
        self._arrived: deque[tuple[int, mx.array]] = deque()
        self._block: Block | None = None
        # Tokens that the next text shares with this one, if it reuses it.
        self._num_common = 0

    def give(self, start: int, features: mx.array) -> None:
        self._awaits_features = False
        self._arrived.append((start, features))
        self._num_given = max(self._num_given, start + features.shape[0])

    @property
    def staleness(self) -> int:
        """What a block lacks are the features of the positions after its anchor."""
        return max(0, len(self._tokens) - 1 - self._end)

    @property
    def foreseen(self) -> int:
        return self._num_given + 1 + self._reader.num_foreseen

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """The logits where nothing is foreseen are all zero."""
        self._tokens += tokens
        self._read_arrived()
        return None if num_logits == 0 else self._logits(len(self._tokens) - num_logits + 1)

    def rewind(self, length: int) -> int:
        if length > len(self._tokens):
            raise RewindError(f"asked to rewind to {length} tokens a text of {len(self._tokens)}")
        del self._tokens[length:]
        return length

    def check(self, length: int) -> None:
        if len(self._tokens) != length:
            raise RewindError(f"the text should have {length} tokens, it has {len(self._tokens)}")

    def forget(self) -> None:
        """Features stay."""
        self._tokens.clear()

    def close(self) -> None:
        self.forget()
        self._cache, self._block = [], None
        self._begin = self._end = 0
        self._arrived.clear()

    # --- reuse by another text with the same beginning --------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self._cache)

    def reusable_length(self, num_common: int, num_read: int) -> int:
        self._num_common = num_common
        return min(num_common, len(self._tokens))

    def reuse(self, length: int) -> None:
        """Features of what the texts do not share were of the other text."""
        self._read_arrived()
        self.rewind(length)
        end = max(self._begin, min(self._end, self._num_common))
        for layer in self._cache:
            layer.trim(self._end - end)
        self._num_given = self._end = end
        self._block, self._awaits_features = None, True

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if features are missing. Those that were given are all in the caches."""
        self._read_arrived()
        if self._begin > 0 or self._end == 0 or not tokens:
            return None
        return SequenceState(tokens, taken_layers(self._cache, self._end))

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=len(self._cache), has_features=False)
        self._cache, self._end = put_layers(state, self._grown)
        self._tokens, self._num_given = [*state.tokens], self._end

    def _grown(self, num_positions: int) -> list[Any]:
        cache = self._reader.make_cache()
        self._reader.read_context(mx.zeros((num_positions, self._reader.feature_width)), 0, cache)
        return cache

    # --- blocks -----------------------------------------------------------------------------------

    def _logits(self, num_tokens: int) -> mx.array:
        """Logits after the first `num_tokens` tokens, and after each of the tokens that follow."""
        parts: list[mx.array] = []
        while num_tokens <= len(self._tokens):
            block = self._block_for(num_tokens)
            index = 0 if block is None else num_tokens - 1 - block.position
            if block is None or index >= self._reader.num_foreseen:
                part = mx.zeros((1, self._reader.vocab_size))
            else:
                end = min(index + len(self._tokens) - num_tokens + 1, self._reader.num_foreseen)
                tokens = self._tokens[block.position : block.position + end]
                part = self._reader.read_after(block, tokens, end - index)
            parts.append(part)
            num_tokens += part.shape[0]
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

    def _read_arrived(self) -> None:
        """Make keys and values of the features that have come."""
        if not self._arrived:
            return
        while self._arrived:
            start, features = self._arrived.popleft()
            if start > self._end or self._begin == self._end:
                # Features between are missing: what comes after them is worth more than what is before.
                self._cache, self._begin, self._end, self._block = self._reader.make_cache(), start, start, None
            # Some may come a second time, if the target has lost its cache.
            known = self._end - start
            if known < features.shape[0]:
                self._reader.read_context(features[known:], self._end, self._cache)
                self._end = start + features.shape[0]
        # The features are kept no longer.
        mx.eval([(layer.keys, layer.values) for layer in self._cache])
