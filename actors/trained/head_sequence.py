"""One text of a drafter with a head for each position.

What such a drafter predicts depends on the features that came last, and on the distance from them, but not on the
tokens between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from actors.mlx.sequence_state import SequenceState
from actors.trained.trained_sequence import TrainedSequence, check_features, check_state
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
        self._num_kept = NUM_KEPT
        # What the heads read of the last positions, the first of which is `_begin`.
        self._begin = 0
        self._hidden: mx.array | None = None
        # By head, at the last position: siblings in the tree have the same.
        self._rows: dict[int, mx.array] = {}

    def give_nothing(self, num_tokens: int) -> None:
        """All are kept, so that each pass reads a head."""
        self._num_kept = num_tokens
        super().give_nothing(num_tokens)

    @property
    def _num_known(self) -> int:
        return self._begin + (0 if self._hidden is None else self._hidden.shape[0])

    @property
    def foreseen(self) -> int:
        return self._num_given + 1 + len(self._heads)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """Does not look at the token, on which nothing depends."""
        logits = self.feed((0,), 1)
        assert logits is not None
        return logits

    def close(self) -> None:
        super().close()
        self._hidden = None
        self._rows.clear()

    # --- reuse by another text with the same beginning --------------------------------------------

    @property
    def num_bytes(self) -> int:
        return 0 if self._hidden is None else int(self._hidden.nbytes)

    def reuse(self, length: int) -> None:
        """Features of what the texts do not share were of the other text."""
        super().reuse(length)
        num_kept = min(self._num_common, self._num_known) - self._begin
        self._hidden = None if self._hidden is None or num_kept <= 0 else self._hidden[:num_kept]
        self._num_given = 0 if self._hidden is None else self._num_known
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
        self._tokens, self._num_given = [*state.tokens], self._num_known

    # --- logits -----------------------------------------------------------------------------------

    def _logits(self, position: int) -> mx.array:
        if position <= self._begin or self._hidden is None:
            return mx.zeros((1, self._vocab_size))
        # The token at position p + 1 is foreseen by the first head on the features of position p - 1.
        first, end = position - 1 - self._begin, min(len(self._tokens), self._num_known + 1) - 1 - self._begin
        if first + 1 < end:
            return self._heads[0](self._hidden[first:end])
        last = self._hidden.shape[0] - 1
        if first < last:
            return self._heads[0](self._hidden[first : first + 1])
        head = first - last
        if head >= len(self._heads):
            return mx.zeros((1, self._vocab_size))
        if head not in self._rows:
            self._rows[head] = self._heads[head](self._hidden[last:])
        return self._rows[head]

    def _look_at(self, start: int, features: mx.array) -> None:
        start, features = max(start, start + features.shape[0] - self._num_kept), features[-self._num_kept :]
        hidden = self._project(features)
        if self._hidden is not None and self._begin <= start <= self._num_known:
            # Some may come a second time, if the target has lost its cache.
            hidden = mx.concatenate([self._hidden[: start - self._begin], hidden])[-self._num_kept :]
        end = start + features.shape[0]
        # A copy: a slice would keep the features of a whole prompt.
        self._hidden, self._begin = mx.contiguous(hidden), end - hidden.shape[0]
        mx.eval(self._hidden)
        self._rows.clear()
