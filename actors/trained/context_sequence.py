"""One text of a drafter whose only caches hold its *context*: what it makes of the target's features.

Such a drafter keeps nothing of the tokens that it reads. So a rewind drops tokens and touches no cache, and the context
grows by what the target has committed alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import Any, Protocol

import mlx.core as mx

from actors.mlx.sequence_state import SequenceState
from actors.trained.trained_sequence import TrainedSequence, check_state, put_layers, taken_layers
from protocol.errors import RewindError


class ContextReader(Protocol):
    """What makes the context.

    Attributes:
        vocab_size: width of its logits: the target's.
        feature_width: width of a position's features.
    """

    vocab_size: int
    feature_width: int

    def make_cache(self) -> list[Any]:
        """Empty caches of mlx-lm's `KVCache`, for what is made of features."""
        ...

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        """Add features to the caches.

        Args:
            features: (n, width) of the positions from `position` on, which come after those in the caches.
        """
        ...


class ContextSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: ContextReader) -> None:
        """Make an empty sequence."""
        super().__init__(reader.feature_width)
        self._context_reader = reader
        self._tokens: list[int] = []
        # What is made of the features of positions from `_begin` to `_end`.
        self._cache = reader.make_cache()
        self._begin = self._end = 0
        # Features that were given and not read yet.
        self._arrived: deque[tuple[int, mx.array]] = deque()
        # Tokens that the next text shares with this one, if it reuses it.
        self._num_common = 0

    def give(self, start: int, features: mx.array) -> None:
        self._awaits_features = False
        self._arrived.append((start, features))
        self._num_given = max(self._num_given, start + features.shape[0])

    @property
    def staleness(self) -> int:
        """What is drafted lacks the features of the positions after the first one without."""
        return max(0, len(self._tokens) - 1 - self._end)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """The logits where nothing is known are all zero."""
        self._tokens += tokens
        self._read_arrived()
        if num_logits == 0:
            return None
        begin, end = len(self._tokens) - num_logits, len(self._tokens)
        parts: list[mx.array] = []
        while begin < end:
            parts.append(self._logits(begin))
            begin += parts[-1].shape[0]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    @abstractmethod
    def _logits(self, position: int) -> mx.array:
        """(n, V) logits after the token at a position, and after some of those that follow it, n >= 1; lazy."""

    def _drop_drafts(self) -> None:
        """Drop what was drafted on the context as it was."""

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
        self._cache = []
        self._begin = self._end = 0
        self._arrived.clear()
        self._drop_drafts()

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
        self._awaits_features = True
        self._drop_drafts()

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
        cache = self._context_reader.make_cache()
        self._context_reader.read_context(mx.zeros((num_positions, self._feature_width)), 0, cache)
        return cache

    # --- the context ------------------------------------------------------------------------------

    def _read_arrived(self) -> None:
        """Make the context of the features that have come."""
        if not self._arrived:
            return
        # Drafts begin behind the new features from now on. For what is not computed yet, the caches would be copied.
        self._drop_drafts()
        while self._arrived:
            start, features = self._arrived.popleft()
            if start > self._end or self._begin == self._end:
                # Features between are missing: what comes after them is worth more than what is before.
                self._cache, self._begin, self._end = self._context_reader.make_cache(), start, start
            # Some may come a second time, if the target has lost its cache.
            known = self._end - start
            if known < features.shape[0]:
                self._context_reader.read_context(features[known:], self._end, self._cache)
                self._end = start + features.shape[0]
        # The features are kept no longer.
        mx.eval([(layer.keys, layer.values) for layer in self._cache])
