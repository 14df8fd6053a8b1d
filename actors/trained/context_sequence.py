"""One text of a drafter that keeps only its *context*, made of the target's features: a rewind touches no cache."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from actors.mlx.sequence_state import SequenceState
from actors.trained.trained_sequence import (
    DrafterReader,
    TrainedSequence,
    check_state,
    copied_layers,
    put_layers,
    taken_layers,
)


class ContextReader(DrafterReader, Protocol):
    """What makes the context."""

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        """Add features to the caches: (n, width) of the positions from `position` on, which come after those there."""


class ContextSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: ContextReader) -> None:
        super().__init__(reader.feature_width)
        self._context_reader = reader
        # What is made of the features of positions from `_begin` to `_end`.
        self._cache = reader.make_cache()
        self._begin = self._end = 0

    @property
    def _num_known(self) -> int:
        return self._end

    def _drop_drafts(self) -> None:
        """Drop what was drafted on the context as it was."""

    def forget(self) -> None:
        super().forget()
        self._drop_drafts()

    def close(self) -> None:
        super().close()
        self._cache, self._begin, self._end = [], 0, 0

    @property
    def num_bytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self._cache)

    def _copy_caches(self) -> None:
        self._cache = copied_layers(self._cache)

    def reuse(self, length: int) -> None:
        """Drops the context of what the texts do not share: its features were the other text's."""
        super().reuse(length)
        end = max(self._begin, min(self._end, self._num_common))
        for layer in self._cache:
            layer.trim(self._end - end)
        self.num_given = self._end = end
        self._drop_drafts()

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if features are missing. Those that were given are all in the caches."""
        self._look_at_arrived()
        if self._begin > 0 or self._end == 0 or not tokens:
            return None
        return SequenceState(tokens, taken_layers(self._cache, self._end))

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=len(self._cache), has_features=False)
        self._cache, self._end = put_layers(state, self._grown)
        self._tokens, self.num_given = [*state.tokens], self._end

    def _grown(self, num_positions: int) -> list[Any]:
        cache = self._context_reader.make_cache()
        self._context_reader.read_context(mx.zeros((num_positions, self.feature_width)), 0, cache)
        return cache

    def _look_at_arrived(self) -> None:
        if not self._arrived:
            return
        # Drafts begin after the new features from now on. Lazy old ones would still read the caches, and force a copy.
        self._drop_drafts()
        super()._look_at_arrived()
        # The features are kept no longer.
        mx.eval([(layer.keys, layer.values) for layer in self._cache])

    def _look_at(self, start: int, features: mx.array) -> None:
        if start > self._end or self._begin == self._end:
            # Features in between are missing: those after the gap are worth more than those before it.
            self._cache, self._begin, self._end = self._context_reader.make_cache(), start, start
        # Some may come a second time, if the target has lost its cache.
        known = self._end - start
        if known < features.shape[0]:
            self._context_reader.read_context(features[known:], self._end, self._cache)
            self._end = start + features.shape[0]
