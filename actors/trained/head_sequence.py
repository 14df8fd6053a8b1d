"""One text of a drafter with a head for each position.

What such a drafter predicts depends on the features that came last, and on the distance from them, but not on the
tokens between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from actors.mlx.sequence_state import SequenceState
from actors.trained.trained_sequence import TrainedSequence, check_features, check_state
from protocol.errors import RewindError
from protocol.messages import Features

# Positions whose features are kept: a drafter that catches up reads no more at a time.
NUM_KEPT = 64

# (n, width) hidden states to (n, V) logits; lazy.
Head = Callable[[mx.array], mx.array]


class HeadSequence(TrainedSequence):
    """See `TrainedSequence`.

    The features of position t foresee the tokens at positions t + 2 up to t + 1 + the number of heads.
    """

    def __init__(self, project: Head, heads: Sequence[Head], feature_width: int, vocab_size: int) -> None:
        """Make an empty sequence.

        Args:
            project: what the heads read, from features.
            heads: the nearest position first.
            feature_width: width of a position's features.
            vocab_size: width of the logits.
        """
        super().__init__(feature_width)
        self._project = project
        self._heads = heads
        self._vocab_size = vocab_size
        self._length = 0
        self._num_kept = NUM_KEPT
        self._arrived: deque[tuple[int, mx.array]] = deque()
        # What the heads read of the last positions, the first of which is `_begin`.
        self._begin = 0
        self._hidden: mx.array | None = None
        # By head, at the last position: siblings in the tree have the same.
        self._rows: dict[int, mx.array] = {}
        # Tokens that the next text shares with this one, if it reuses it.
        self._num_common = 0

    def give(self, start: int, features: mx.array) -> None:
        self._awaits_features = False
        self._arrived.append((start, features))
        self._num_given = start + features.shape[0]

    def give_nothing(self, num_tokens: int) -> None:
        """All are kept, so that each pass reads a head."""
        self._num_kept = num_tokens
        super().give_nothing(num_tokens)

    @property
    def staleness(self) -> int:
        """What a head lacks are the features of the positions that it passes over."""
        return max(0, self._length - 1 - self._end)

    @property
    def foreseen(self) -> int:
        return self._num_given + 1 + len(self._heads)

    @property
    def length(self) -> int:
        return self._length

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """The logits where nothing is foreseen are all zero."""
        self._length += len(tokens)
        return None if num_logits == 0 else self._logits(self._length - num_logits, self._length)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Does not look at the token."""
        self._length += 1
        return self._logits(self._length - 1, self._length)

    def rewind(self, length: int) -> int:
        if length > self._length:
            raise RewindError(f"asked to rewind to {length} tokens a text of {self._length}")
        self._length = length
        return length

    def check(self, length: int) -> None:
        if self._length != length:
            raise RewindError(f"the text should have {length} tokens, it has {self._length}")

    def forget(self) -> None:
        """Features stay."""
        self._length = 0

    def close(self) -> None:
        self._length = self._num_given = 0
        self._awaits_features = True
        self._arrived.clear()
        self._hidden = None
        self._rows.clear()

    # --- reuse by another text with the same beginning --------------------------------------------

    @property
    def num_bytes(self) -> int:
        return 0 if self._hidden is None else int(self._hidden.nbytes)

    def reusable_length(self, num_common: int, num_read: int) -> int:
        self._num_common = num_common
        return min(num_common, self._length)

    def reuse(self, length: int) -> None:
        """Features of what the texts do not share were of the other text."""
        self._look_at_arrived()
        self._length, self._awaits_features = length, True
        num_kept = min(self._num_common, self._end) - self._begin
        self._hidden = None if self._hidden is None or num_kept <= 0 else self._hidden[:num_kept]
        self._num_given = self._end if self._hidden is not None else 0
        self._rows.clear()

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also without features."""
        self._look_at_arrived()
        if self._hidden is None or not tokens:
            return None
        return SequenceState(tokens, (), features=Features(self._begin, self._hidden))

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=0, has_features=True)
        assert state.features is not None
        check_features(state.features, self._project(mx.zeros((1, self._feature_width))))
        self._begin, self._hidden = state.features.start, state.features.values
        self._length, self._num_given = len(state.tokens), self._end

    # --- logits -----------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        """The position after the last one whose features are known."""
        return self._begin + (0 if self._hidden is None else self._hidden.shape[0])

    def _logits(self, begin: int, end: int) -> mx.array:
        """(end - begin, V) logits after the tokens at positions from `begin` to `end`."""
        self._look_at_arrived()
        # The token at position p + 1 is foreseen by the first head on the features of position p - 1.
        known_end = self._end
        parts: list[mx.array] = []
        position = begin
        while position < end:
            if position <= self._begin or self._hidden is None:
                parts.append(mx.zeros((1, self._vocab_size)))
                position += 1
            elif position < known_end and position < end - 1:
                last = min(end, known_end + 1)
                parts.append(self._heads[0](self._hidden[position - 1 - self._begin : last - 1 - self._begin]))
                position = last
            elif position <= known_end:
                parts.append(self._row(0, position - 1 - self._begin))
                position += 1
            else:
                parts.append(self._row(position - known_end, self._hidden.shape[0] - 1))
                position += 1
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _row(self, head: int, index: int) -> mx.array:
        """(1, V) logits of a head at one of the positions whose features are kept."""
        assert self._hidden is not None
        if head >= len(self._heads):
            return mx.zeros((1, self._vocab_size))
        if index < self._hidden.shape[0] - 1:
            return self._heads[head](self._hidden[index : index + 1])
        if head not in self._rows:
            self._rows[head] = self._heads[head](self._hidden[index:])
        return self._rows[head]

    def _look_at_arrived(self) -> None:
        while self._arrived:
            start, features = self._arrived.popleft()
            start, features = max(start, start + features.shape[0] - self._num_kept), features[-self._num_kept :]
            hidden = self._project(features)
            if self._hidden is not None and self._begin <= start <= self._begin + self._hidden.shape[0]:
                # Some may come a second time, if the target has lost its cache.
                hidden = mx.concatenate([self._hidden[: start - self._begin], hidden])[-self._num_kept :]
            end = start + features.shape[0]
            # A copy: a slice would keep the features of a whole prompt.
            self._hidden, self._begin = mx.contiguous(hidden), end - hidden.shape[0]
            mx.eval(self._hidden)
            self._rows.clear()
