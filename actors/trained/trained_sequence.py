"""What the texts of trained drafters have in common, whatever they read the target's features for."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from typing import cast

import mlx.core as mx

from actors.model import ReusableSequence, RewindMode
from actors.trained.feature_input import FeatureInput
from protocol.errors import RewindError


class TrainedSequence(ReusableSequence, FeatureInput):
    """A `CachedSequence` that takes features, and can go back to any length.

    Features are given in any thread; everything else happens on the model's.
    """

    def __init__(self, feature_width: int) -> None:
        """Make an empty sequence.

        Args:
            feature_width: width of a position's features.
        """
        self._feature_width = feature_width
        # The position after the last of all features that were given.
        self._num_given = 0
        self._awaits_features = True

    def give_nothing(self, num_tokens: int) -> None:
        zeros = mx.zeros((num_tokens, self._feature_width))
        mx.eval(zeros)
        self.give(0, zeros)

    @property
    def awaits_features(self) -> bool:
        return self._awaits_features

    @property
    def num_given(self) -> int:
        return self._num_given

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Waits for the token."""
        logits = self.feed((cast(int, token.item()),), 1)
        assert logits is not None
        return logits

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode.TRIM


class LedgerSequence(TrainedSequence):
    """One that counts the tokens of its text, and reads them, and the features that have come, as logits are wanted."""

    def __init__(self, feature_width: int) -> None:
        super().__init__(feature_width)
        self._tokens: list[int] = []
        # Features that were given and not looked at yet.
        self._arrived: deque[tuple[int, mx.array]] = deque()
        # Tokens that the next text shares with this one, if it reuses it.
        self._num_common = 0

    def give(self, start: int, features: mx.array) -> None:
        self._awaits_features = False
        self._arrived.append((start, features))
        self._num_given = max(self._num_given, start + features.shape[0])

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """The logits where nothing is foreseen are all zero."""
        self._tokens += tokens
        self._look_at_arrived()
        if num_logits == 0:
            self._read_text()
            return None
        return self._logits(len(self._tokens) - num_logits + 1)

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
        self._tokens.clear()
        self._arrived.clear()

    def reusable_length(self, num_common: int, num_read: int) -> int:
        self._num_common = num_common
        return min(num_common, len(self._tokens))

    def reuse(self, length: int) -> None:
        self._look_at_arrived()
        self.rewind(length)
        self._awaits_features = True

    def _look_at_arrived(self) -> None:
        while self._arrived:
            self._look_at(*self._arrived.popleft())

    @abstractmethod
    def _look_at(self, start: int, features: mx.array) -> None:
        """Take the features of positions from `start` on, which may be known in part, or come after some missing."""

    def _read_text(self) -> None:
        """Read what can be read without logits."""

    @abstractmethod
    def _logits(self, num_tokens: int) -> mx.array:
        """Logits after the first `num_tokens` tokens, and after each of the tokens that follow."""
