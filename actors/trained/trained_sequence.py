"""What the texts of trained drafters have in common, whatever they read the target's features for."""

from __future__ import annotations

from typing import cast

import mlx.core as mx

from actors.model import ReusableSequence, RewindMode
from actors.trained.feature_input import FeatureInput


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
