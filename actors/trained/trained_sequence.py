"""What the sequences of all kinds of trained drafters have in common."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx

from actors.mlx.cache_kinds import LayerState, MisfitError, kind_of, lengths_of
from actors.mlx.sequence_state import SequenceState, StatefulSequence
from actors.model import RewindMode
from actors.prefix_cache import common_length, pack
from actors.trained.feature_input import FeatureInput
from actors.trained.shared_reading import SharedReading, read_alone
from protocol.errors import RewindError
from protocol.messages import Features
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS

_TOKENS_PER_PASS = 512  # tokens that are read in one pass once a text is over


class DrafterReader(Protocol):
    """A drafter's forward pass."""

    vocab_size: int  # width of its logits: the target's
    feature_width: int  # width of a position's features

    def make_cache(self) -> list[Any]:
        """Empty caches of mlx-lm's `KVCache`."""


class TrainedSequence(StatefulSequence, FeatureInput):
    """A `CachedSequence` that takes features, which wait until it is fed, reused or saved; rewinds to any length."""

    def __init__(self, feature_width: int) -> None:
        self.feature_width = feature_width
        self._tokens: list[int] = []
        self._arrived: deque[tuple[int, mx.array]] = deque()  # features that were given but not looked at yet
        self._num_common = 0  # tokens that the next text shares with this one, if it reuses it

    def give(self, start: int, features: mx.array) -> None:
        self.awaits_features = False
        self._arrived.append((start, features))
        self.num_given = max(self.num_given, start + features.shape[0])

    def give_nothing(self, num_tokens: int) -> None:
        zeros = mx.zeros((num_tokens, self.feature_width))
        mx.eval(zeros)
        self.give(0, zeros)

    @property
    @abstractmethod
    def _num_known(self) -> int:
        """The position after the last one whose features were looked at."""

    @property
    def staleness(self) -> int:
        """The number of positions without features, except the last, whose features a draft after it does not need."""
        return max(0, len(self._tokens) - 1 - self._num_known)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """Logits are all zero where nothing can be predicted."""
        return read_alone(self.reading(tokens, num_logits))

    def reading(self, tokens: tuple[int, ...], num_logits: int) -> SharedReading[mx.array | None]:
        """As `feed`, in passes that others may share."""
        self._tokens += tokens
        self._look_at_arrived()
        if num_logits == 0:
            yield from self._read_text()
            return None
        begin, end = len(self._tokens) - num_logits, len(self._tokens)
        parts: list[mx.array] = []
        while begin < end:
            parts.append((yield from self._logits(begin)))
            begin += parts[-1].shape[0]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Waits for the token."""
        logits = self.feed((cast(int, token.item()),), 1)
        assert logits is not None
        return logits

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        return RewindMode.TRIM

    def rewind(self, length: int) -> int:
        if length > len(self._tokens):
            raise RewindError(f"asked to rewind to {length} tokens a text of {len(self._tokens)}")
        del self._tokens[length:]
        return length

    def check(self, length: int) -> None:
        if len(self._tokens) != length:
            raise RewindError(f"the text should have {length} tokens, it has {len(self._tokens)}")

    def forget(self) -> None:
        """Features stay, but nothing that was drafted: a pass that has failed may have been shared."""
        self._tokens.clear()

    def close(self) -> None:
        self.forget()
        self._arrived.clear()

    def settle(self, tokens: tuple[int, ...], text: Sequence[int]) -> tuple[int, ...]:
        """Reads the text as far as features were given, so that these are all of cached tokens."""
        num_read = self.rewind(min(common_length(pack(tokens), pack(text)), self.length))
        # The token at a position is read with the features of the position before.
        end = min(self.num_given + 1, len(text)) if self.num_given else num_read
        for begin in range(num_read, end, _TOKENS_PER_PASS):
            self.feed(tuple(text[begin : min(end, begin + _TOKENS_PER_PASS)]), 0)
        return tuple(text[: self.length])

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        self._num_common = num_common
        return min(num_common, len(self._tokens))

    def reuse(self, length: int) -> None:
        self._look_at_arrived()
        self.rewind(length)
        self.awaits_features = True

    def copy(self, length: int) -> TrainedSequence:
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (list, dict, deque)):
                setattr(other, name, copy.copy(value))
        other._copy_caches()
        other._num_common = length
        other.reuse(length)
        return other

    def _copy_caches(self) -> None:
        """Replace the caches, which a shallow copy shares with the sequence that was copied."""

    def _look_at_arrived(self) -> None:
        while self._arrived:
            self._look_at(*self._arrived.popleft())

    @abstractmethod
    def _look_at(self, start: int, features: mx.array) -> None:
        """Take the features of positions from `start` on. Some may be known already, or some before them be missing."""

    def _read_text(self) -> SharedReading[None]:
        """Read what can be read without logits."""
        yield from ()

    @abstractmethod
    def _logits(self, position: int) -> SharedReading[mx.array]:
        """(n, V) logits after the token at a position, and after some of those that follow it, n >= 1; lazy."""


def copied_layers(cache: Sequence[Any]) -> list[Any]:
    """New caches with the same tokens."""
    return [kind_of(layer).copied(layer) for layer in cache]


def taken_layers(cache: Sequence[Any], num_rows: int) -> tuple[LayerState, ...]:
    """The states of caches of mlx-lm's `KVCache` as they were after the first `num_rows` rows."""
    layers = [copy.copy(layer) for layer in cache]
    for layer in layers:
        layer.trim(layer.offset - num_rows)
    return tuple(kind_of(layer).take_state(layer) for layer in layers)


def check_state(state: SequenceState, *, num_layers: int, has_features: bool) -> None:
    """Raises: MisfitError: a drafter with so many caches, with or without features, cannot have this state."""
    state.check(num_layers=num_layers, has_features=has_features)
    if state.prefix_checkpoints:
        raise MisfitError("it has prefix checkpoints, which a trained drafter has none of")


def put_layers(state: SequenceState, grown: Callable[[int], Sequence[Any]]) -> tuple[list[Any], int]:
    """New caches with the layers of a state, whose shapes must be those of the caches that `grown` makes, and their
    number of rows. Raises: MisfitError: they are not.
    """
    like = [*zip(grown(1), grown(8), strict=True)]
    cache = [kind_of(pair[0]).put_state(taken, *pair) for taken, pair in zip(state.layers, like, strict=True)]
    lengths = lengths_of(cache)
    if len(lengths) != 1:
        raise MisfitError(f"its caches hold different numbers of positions, {sorted(lengths)}")
    return cache, lengths.pop()


def check_features(features: Features, like: mx.array) -> None:
    """Raises: MisfitError: the features are not rows of the same width as those of `like`."""
    values = features.values
    fits = values.ndim == 2 and values.shape[1] == like.shape[1] and mx.issubdtype(values.dtype, mx.floating)
    if not fits or features.start < 0 or values.shape[0] == 0:
        raise MisfitError(
            f"its features are an array of {values.shape} and {values.dtype} from position {features.start} on, not "
            f"rows of a width of {like.shape[1]}"
        )


class ContextReader(DrafterReader, Protocol):
    """What makes the context."""

    def read_context(self, features: mx.array, position: int, cache: list[Any]) -> None:
        """Add features to the caches: (n, width) of the positions from `position` on, which come after those there."""


class ContextSequence(TrainedSequence):
    """One text of a drafter that keeps only its *context*, made of the target's features: a rewind touches no cache."""

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
