"""What the draft actor knows of a text that reads its target's features, whatever kind of drafter reads them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class FeatureInput(ABC):
    """The part of a sequence that takes features. They are given in any thread."""

    @abstractmethod
    def give(self, start: int, features: mx.array) -> None:
        """Give the features of positions from `start` on.

        Args:
            start: the position of the first.
            features: (n, width) evaluated.
        """

    @abstractmethod
    def give_nothing(self, num_tokens: int) -> None:
        """Give zeros for features, to time passes with."""

    @property
    @abstractmethod
    def awaits_features(self) -> bool:
        """Whether no features were given yet of the text that it is used for."""

    @property
    def foreseen(self) -> int | None:
        """The first position whose token cannot be drafted from the features that were given; None without a bound."""
        return None
