"""Hidden states of scripted models: a target that records them, and a drafter that reads them.

They are empty. What counts is which of them have come: where one is missing, the drafter reads its own.
"""

from __future__ import annotations

import mlx.core as mx

from actors.trained.feature_input import FeatureInput
from protocol.messages import Features


class RecordsEmptyFeatures:
    """The part of a `CachedSequence` that concerns features, for a scripted target that records them."""

    _num_taken = 0

    def feature_arrays(self) -> list[mx.array]:
        return [mx.zeros((1,))]

    def take_features(self, end: int) -> Features | None:
        begin, self._num_taken = self._num_taken, max(self._num_taken, end)
        return Features(begin, mx.zeros((end - begin, 1))) if begin < end else None

    def forget_taken(self) -> None:
        """Hand over all features again, since the text is read again."""
        self._num_taken = 0


class ReadsFeatures(FeatureInput):
    """The part of a `CachedSequence` that concerns features, for a scripted drafter that reads them.

    To read the token at position j, it needs the hidden state of position j - 1.
    """

    _num_given = _num_fresh = 0  # positions whose hidden states have come, and that were looked at
    _first_stale: int | None = None  # the first token that was read with a hidden state of its own

    def give(self, start: int, features: mx.array) -> None:
        self._num_given = max(self._num_given, start + features.shape[0])

    def give_nothing(self, num_tokens: int) -> None:
        self._num_given = self._num_fresh = num_tokens

    @property
    def awaits_features(self) -> bool:
        return self._num_given == 0

    @property
    def num_given(self) -> int:
        return self._num_given

    def note_read(self, begin: int, end: int) -> None:
        """Note that the tokens of positions from `begin` to `end` are read."""
        first = self._num_fresh + 1
        if self._first_stale is None and end > first:
            self._first_stale = max(begin, first)

    def note_rewound(self, length: int) -> None:
        """Note that `length` tokens are left, and look at the hidden states that have come."""
        if self._first_stale is not None and self._first_stale >= length:
            self._first_stale = None
        self._num_fresh = self._num_given

    def forget_stale(self) -> None:
        """Note that no token is left."""
        self._first_stale = None

    def staleness_at(self, length: int) -> int:
        """Tokens before position `length` that were read with hidden states of its own."""
        return 0 if self._first_stale is None else max(0, length - self._first_stale)

    def usable_length(self, length: int) -> int:
        """Of `length` tokens, how many need not be read again with hidden states that have come since."""
        if self._first_stale is not None and self._first_stale <= self._num_given:
            return self._first_stale
        return length
