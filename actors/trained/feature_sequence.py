"""One text of a drafter that reads features: tokens whose features have come, and tokens ahead of them.

To read the token at position j, such a drafter needs the features of position j - 1. The target gives them when it has
committed the token at position j - 1. Until then, the drafter's own hidden state stands for them, and what it drafts on
that is *stale*. When the features of such positions come, `length` falls to the first token that was read without them.
So these tokens are fed again, with features, in one pass; for positions that still have no features, the drafter's
hidden states of before are used.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import attrs
import mlx.core as mx

from actors.mlx.cache_kinds import MisfitError
from actors.mlx.sequence_state import SequenceState
from actors.trained.positioned_rows import PositionedRows
from actors.trained.trained_sequence import TrainedSequence, check_features, check_state, put_layers, taken_layers
from protocol.errors import RewindError
from protocol.messages import Features


class FeatureReader(Protocol):
    """A drafter's forward pass.

    Attributes:
        vocab_size: width of its logits: the target's.
        feature_width: width of a position's features.
    """

    vocab_size: int
    feature_width: int

    def project(self, features: mx.array) -> mx.array:
        """(n, features) → (n, hidden size): the hidden states that stand for features; lazy."""
        ...

    def make_cache(self) -> list[Any]:
        """Empty caches that can be trimmed to any length."""
        ...

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process tokens after the cached ones.

        Args:
            hidden: (n, hidden size), of the positions before the tokens.
            tokens: (n,) ids.
            cache: see `make_cache`.

        Returns: (n, hidden size) hidden states, which stand for the features of the tokens' positions, and (n, V)
            logits, V being the target's; lazy.
        """
        ...


@attrs.frozen
class _OwnState:
    """The drafter's own hidden state at the position of a token."""

    token: int
    hidden: mx.array


class FeatureSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, reader: FeatureReader) -> None:
        """Make an empty sequence."""
        super().__init__(reader.feature_width)
        self._reader = reader
        self._cache = reader.make_cache()
        self._tokens: list[int] = []
        # Tokens at the beginning before which nothing was known: they are in no cache. The first token of a text always
        # is one of them.
        self._num_skipped = 0
        # The first token that was read with the drafter's own hidden state, and with it all after it.
        self._first_stale: int | None = None
        # Projected features, and the drafter's own hidden states by position.
        self._fresh = PositionedRows()
        self._own: dict[int, _OwnState] = {}
        # Features that were given and not looked at yet, and the position of the first of all without a gap.
        self._arrived: deque[tuple[int, mx.array]] = deque()
        self._first_given = 0
        # Tokens that the next text shares with this one, if it reuses it.
        self._num_common = 0

    def give(self, start: int, features: mx.array) -> None:
        """Give the features of positions from `start` on. In any thread.

        Args:
            start: any position. Where those before are missing, the text is read from there on.
            features: (n, width) evaluated.
        """
        self._awaits_features = False
        if self._num_given == 0:
            self._first_given = start
        self._arrived.append((start, features))
        self._num_given = max(self._num_given, start + features.shape[0])

    def give_nothing(self, num_tokens: int) -> None:
        super().give_nothing(num_tokens)
        # Now, since passes are timed that follow no rewind. Without hidden states they would compute nothing.
        self._look_at_arrived()

    @property
    def staleness(self) -> int:
        return 0 if self._first_stale is None else len(self._tokens) - self._first_stale

    @property
    def refreshes_at(self) -> int | None:
        if self._first_stale is None or self._first_stale < self._first_given + 1:
            return None
        return self._first_stale

    @property
    def length(self) -> int:
        """Tokens that need not be fed again."""
        # The first token that can be read with the features that were given.
        readable = self._first_given + 1
        if readable < self._num_skipped and readable <= self._num_given:
            return readable
        if (refreshed := self.refreshes_at) is not None and refreshed <= self._num_given:
            return refreshed
        return len(self._tokens)

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        logits: list[mx.array] = []
        rest = tokens
        while rest:
            if parts := self._hidden_before(rest):
                hidden = mx.concatenate(parts)
                logits.append(self._read(rest[: hidden.shape[0]], hidden))
                rest = rest[hidden.shape[0] :]
            else:
                logits.append(self._skip(rest[0]))
                rest = rest[1:]
        if num_logits == 0:
            mx.eval([layer.state for layer in self._cache if not layer.empty()])
            return None
        return mx.concatenate(logits)[-num_logits:]

    def rewind(self, length: int) -> int:
        """Looks at the features that have come, and so may leave fewer tokens."""
        if length > len(self._tokens):
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {len(self._tokens)}")
        self._cut(min(length, self.length))
        self._look_at_arrived()
        return len(self._tokens)

    def check(self, length: int) -> None:
        expected = max(0, length - self._num_skipped)
        for i, layer in enumerate(self._cache):
            if layer.offset != expected or len(self._tokens) != length:
                raise RewindError(
                    f"layer {i} should hold {expected} of {length} tokens, it holds {layer.offset} of "
                    f"{len(self._tokens)}"
                )

    def forget(self) -> None:
        """Features stay."""
        self._cache = self._reader.make_cache()
        self._tokens, self._first_stale, self._num_skipped = [], None, 0
        self._own.clear()

    def close(self) -> None:
        self.forget()
        self._cache = []
        self._fresh.clear()
        self._arrived.clear()

    # --- reuse by another text with the same beginning --------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(int(layer.nbytes) for layer in self._cache) + self._fresh.num_bytes

    def reusable_length(self, num_common: int, num_read: int) -> int:
        """What was read without features is not reused, nor what those for the next token are missing after."""
        self._num_common = num_common
        length = min(num_common, self._num_fresh)
        return 0 if self._num_skipped > 1 or length <= self._first_given else length

    def reuse(self, length: int) -> None:
        self._cut(length)
        self._own.clear()
        self._look_at_arrived()
        # Beyond what the texts share, features are of the other one.
        self._fresh.drop_from(self._num_common)
        self._num_given = self._fresh.end if self._fresh.pieces else 0
        self._awaits_features = True
        self.check(length)

    @property
    def _num_fresh(self) -> int:
        """Tokens that were read with features."""
        return len(self._tokens) if self._first_stale is None else self._first_stale

    @property
    def num_fed(self) -> int:
        return len(self._tokens)

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if features are missing."""
        rows, length = self._fresh.copy(), self._num_fresh
        for arrived in self._arrived.copy():
            self._add(rows, *arrived)
        if self._num_skipped != 1 or length < 2 or not rows.pieces or rows.begin >= length:
            return None
        features = Features(rows.begin, rows.between(rows.begin, rows.end))
        return SequenceState(tokens[:length], taken_layers(self._cache, length - 1), features=features)

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=len(self._cache), has_features=True)
        features, length = state.features, len(state.tokens)
        assert features is not None
        check_features(features, self._reader.project(mx.zeros((1, self._reader.feature_width))))
        cache, num_rows = put_layers(state, self._grown)
        # The first token is in no cache, and the next one is read with the features of the last.
        if num_rows != length - 1 or not features.start < length <= features.start + features.values.shape[0] + 1:
            raise MisfitError(f"it has {num_rows} positions, and features from {features.start} on, of {length} tokens")
        self._cache, self._tokens, self._num_skipped = cache, [*state.tokens], 1
        self._fresh.add(features.start, features.values)
        self._first_given, self._num_given = features.start, self._fresh.end

    def _grown(self, num_rows: int) -> list[Any]:
        cache = self._reader.make_cache()
        hidden = self._reader.project(mx.zeros((num_rows, self._reader.feature_width)))
        self._reader.read(hidden, mx.zeros(num_rows, mx.int32), cache)
        return cache

    # --- hidden states ----------------------------------------------------------------------------

    def _hidden_before(self, tokens: tuple[int, ...]) -> list[mx.array]:
        """(n, hidden size) arrays of the hidden states before the first tokens to come, as far as they are known."""
        found: list[mx.array] = []
        begin = len(self._tokens)
        position, end = begin - 1, begin - 1 + len(tokens)
        while 0 <= position < end:
            if self._fresh.begin <= position < self._fresh.end:
                found.append(self._fresh.between(position, min(end, self._fresh.end)))
                position += found[-1].shape[0]
                continue
            hidden = self._own_at(position, tokens[position - begin] if position >= begin else self._tokens[position])
            if hidden is None:
                break
            found.append(hidden[None])
            position += 1
        return found

    def _own_at(self, position: int, token: int) -> mx.array | None:
        own = self._own.get(position)
        if own is not None and own.token != token:
            # Of a text that has gone another way since.
            self._own = {at: other for at, other in self._own.items() if at < position}
            return None
        return None if own is None else own.hidden

    def _read(self, tokens: tuple[int, ...], hidden: mx.array) -> mx.array:
        begin = len(self._tokens)
        num_fresh = self._fresh.end
        given, logits = self._reader.read(hidden, mx.array(tokens), self._cache)
        for i, token in enumerate(tokens):
            if begin + i >= num_fresh:
                self._own[begin + i] = _OwnState(token, given[i])
        if self._first_stale is None and begin + len(tokens) > num_fresh + 1:
            self._first_stale = max(begin, num_fresh + 1)
        self._tokens += tokens
        return logits

    def _skip(self, token: int) -> mx.array:
        """Count a token at the beginning before which nothing is known. Returns: (1, V) logits that say nothing."""
        if len(self._tokens) > self._num_skipped:
            raise RewindError(f"the hidden state before token {len(self._tokens)} is not known")
        self._tokens.append(token)
        self._num_skipped = len(self._tokens)
        return mx.zeros((1, self._reader.vocab_size))

    def _cut(self, length: int) -> None:
        for layer in self._cache:
            layer.trim(layer.offset - max(0, length - self._num_skipped))
        del self._tokens[length:]
        self._num_skipped = min(self._num_skipped, length)
        if self._first_stale is not None and self._first_stale >= length:
            self._first_stale = None

    def _look_at_arrived(self) -> None:
        while self._arrived:
            self._look_at(*self._arrived.popleft())

    def _look_at(self, start: int, features: mx.array) -> None:
        if self._fresh.pieces and start > self._fresh.end:
            # Features between are missing: what comes after them is worth more than what is before.
            self._cut(0)
            self._own.clear()
            self._first_given = start
        if self._add(self._fresh, start, features):
            self._own = {position: own for position, own in self._own.items() if position >= self._fresh.end}

    def _add(self, rows: PositionedRows, start: int, features: mx.array) -> bool:
        """Add features that have come to others. Returns: whether some are new."""
        # Some may come a second time, if the target has lost its cache.
        known = max(0, rows.end - start) if rows.pieces else 0
        if known >= features.shape[0]:
            return False
        rows.add(start + known, self._reader.project(features[known:]))
        return True
