"""Texts in scripted models, also in targets that record hidden states and in drafters that read them.

Hidden states are empty. All that matters is which of them have come: where one is missing, the drafter reads its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import cast

import mlx.core as mx

from actors.model import ReusableSequence, RewindMode
from actors.trained.feature_input import FeatureInput
from protocol.errors import RewindError
from protocol.messages import Features
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS


class ScriptedSequence(ReusableSequence):
    """One text of a scripted model: the tokens that it was fed, and nothing else. Any of them can be dropped.

    Subclasses give the model's logits, in `row`.
    """

    num_bytes = 0  # a list of tokens does not count

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def row(self, length: int) -> Sequence[float]:
        """The logits after the first `length` tokens."""
        raise NotImplementedError

    def staleness_at(self, length: int) -> int:
        """Hidden states of its own that a drafter has read for the first `length` tokens; 0 if it reads none."""
        return 0

    def take(self, tokens: tuple[int, ...]) -> None:
        """Append tokens."""
        self.tokens += tokens

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        del self.tokens[length:]

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self.take(tokens)
        end = len(self.tokens) + 1
        return mx.array([self.row(length) for length in range(end - num_logits, end)]) if num_logits else None

    def feed_lazy(self, token: mx.array) -> mx.array:
        self.take((cast(int, token.item()),))
        return mx.array([self.row(len(self.tokens))])

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode.TRIM

    def rewind(self, length: int) -> int:
        if length > len(self.tokens):
            raise RewindError(f"asked a script for length {length}, it holds {len(self.tokens)}")
        self.cut(length)
        return length

    def check(self, length: int) -> None:
        if length != len(self.tokens):
            raise RewindError(f"a script should hold {length} tokens, it holds {len(self.tokens)}")

    def forget(self) -> None:
        self.cut(0)

    @property
    def length(self) -> int:
        return len(self.tokens)

    def close(self) -> None:
        self.tokens.clear()

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        return min(num_common, len(self.tokens))

    def copy(self, length: int) -> ScriptedSequence:
        other = copy.copy(self)
        other.tokens = self.tokens[:length]
        return other

    def reuse(self, length: int) -> None:
        self.rewind(length)


class EmptyFeatures:
    """See `TextFeatures`."""

    num_taken = 0

    def want(self, wanted: bool) -> None:
        """Nothing to do: empty features cost nothing."""

    def arrays(self) -> list[mx.array]:
        return [mx.zeros((1,))]

    def take(self, end: int) -> Features | None:
        begin, self.num_taken = self.num_taken, max(self.num_taken, end)
        return Features(begin, mx.zeros((end - begin, 1))) if begin < end else None


class RecordsEmptyFeatures(ScriptedSequence):
    """One text of a target that records features."""

    @cached_property
    def features(self) -> EmptyFeatures:
        return EmptyFeatures()

    def copy(self, length: int) -> RecordsEmptyFeatures:
        other = super().copy(length)
        other.features = EmptyFeatures()
        other.features.num_taken = length
        return other

    def forget(self) -> None:
        """The text is read again, and all features are handed over again."""
        super().forget()
        self.features.num_taken = 0


class ReadsFeatures(FeatureInput, ScriptedSequence):
    """One text of a drafter that reads features.

    To read the token at position j, it needs the hidden state of position j - 1.
    """

    _num_fresh = 0  # positions whose hidden states have come and were looked at
    _first_stale: int | None = None  # the first token that was read with a hidden state of the drafter's own

    def give(self, start: int, features: mx.array) -> None:
        self.awaits_features = False
        self.num_given = max(self.num_given, start + features.shape[0])

    def give_nothing(self, num_tokens: int) -> None:
        self.awaits_features = False
        self.num_given = self._num_fresh = num_tokens

    @property
    def staleness(self) -> int:
        return self.staleness_at(len(self.tokens))

    def staleness_at(self, length: int) -> int:
        """Tokens before position `length` that were read with hidden states of the drafter's own."""
        return 0 if self._first_stale is None else max(0, length - self._first_stale)

    @property
    def length(self) -> int:
        """See `CachedSequence.length`: tokens that need not be read again with hidden states that have come since."""
        if self._first_stale is not None and self._first_stale <= self.num_given:
            return self._first_stale
        return len(self.tokens)

    def take(self, tokens: tuple[int, ...]) -> None:
        """Note which tokens are read with hidden states of the drafter's own."""
        begin, first = len(self.tokens), self._num_fresh + 1
        super().take(tokens)
        if self._first_stale is None and len(self.tokens) > first:
            self._first_stale = max(begin, first)

    def rewind(self, length: int) -> int:
        remaining = super().rewind(min(length, self.length))
        if self._first_stale is not None and self._first_stale >= remaining:
            self._first_stale = None
        self._num_fresh = self.num_given
        return remaining

    def forget(self) -> None:
        super().forget()
        self._first_stale = None
