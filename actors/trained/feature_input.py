"""What the draft actor knows of a sequence that reads its target's features, whatever the kind of its drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod

import mlx.core as mx


class FeatureInput(ABC):
    """The part of a sequence that takes features. They are given in any thread."""

    # For each row of logits of the last feed, the drafter's own estimate of how likely a token drafted there is
    # accepted, whichever token it is; (num_logits,) in [0, 1], lazy. None if it makes no estimates.
    acceptance: mx.array | None = None
    awaits_features: bool = True  # whether no features of the present text were given yet
    # The position after the last one whose features were given; 0 before any were. May be read in any thread.
    num_given: int = 0

    @abstractmethod
    def give(self, start: int, features: mx.array) -> None:
        """Give the features of positions from `start` on, (n, width), evaluated."""

    @abstractmethod
    def give_nothing(self, num_tokens: int) -> None:
        """Give zeros for features, to time passes with. On the model's thread."""

    @property
    @abstractmethod
    def staleness(self) -> int:
        """In a draft after the present text, how many of the drafter's own hidden states stand for the target's."""

    @property
    def foreseen(self) -> int | None:
        """The first position whose token cannot be drafted from the features that were given; None without a bound."""
        return None
