"""A batch: several texts of one model as rows of shared caches, and forward passes over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_kinds import kind_of, kinds_of
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating
from actors.mlx.memory import release_buffers
from actors.mlx.row_caches import STEP, RowCache
from actors.trained.features import FeatureRecorder, recording
from protocol.errors import RewindError
from protocol.prefill_chunks import MAX_CHUNK_TOKENS


class RowBatch:
    """Several texts in the row caches of one model. A row is named by a key that stays while other rows come and go.

    Attributes:
        is_recurrent: whether a row can only go back to where it was before its last pass.
        rewinds_passes: whether a row can go back to any length, and not just to one within its last pass.
        widest_row: most tokens of one row in a pass.
        pads_texts: whether each row takes as much memory as the longest.
    """

    def __init__(
        self, model: Module, caches: Sequence[Any], layer_evaluation: LayerEvaluation, *, vocab_size: int
    ) -> None:
        """Make an empty batch; `caches` are those of one text, each of a kind that has a `row_cache`."""
        self._model = model
        self._features: dict[object, mx.array] = {}  # by key: (tokens, width) of the last pass
        self._vocab_size = vocab_size
        self._caches = [kind_of(layer).row_cache(layer) for layer in caches]
        row_caches: list[RowCache] = [rows for _, rows in kinds_of(self._caches)]
        self._row_caches = row_caches  # without the lists that some of them are in
        self.is_recurrent = any(rows.is_recurrent for rows in row_caches)
        self.rewinds_passes = all(rows.rewinds_passes for rows in row_caches)
        self.widest_row = min((rows.max_width for rows in row_caches), default=MAX_CHUNK_TOKENS)
        self.pads_texts = any(rows.is_padded for rows in row_caches)
        self._layer_evaluation = layer_evaluation
        self._keys: list[object] = []
        self._row_of: dict[object, int] = {}  # by key: its index
        self._lengths: list[int] = []
        # Lengths before the last pass, from which recurrent states are kept, and which rows are to go back there.
        self._lengths_before: list[int] = []
        self._goes_back: list[bool] = []

    def __len__(self) -> int:
        return len(self._keys)

    def length(self, key: object) -> int:
        return self._lengths[self._row_of[key]]

    def join(self, key: object, caches: Sequence[Any], length: int) -> None:
        """Add a row with the text of one text's caches, which give it up."""
        self._settle()
        for rows, (_, single) in zip(self._row_caches, kinds_of(caches), strict=True):
            rows.join(single, length)
        self._append_row(key, length)

    def absorb(self, other: RowBatch) -> None:
        """Take in all rows of another batch of the model, which gives them up. That copies each of them once."""
        self._settle()
        other._settle()
        for rows, others in zip(self._row_caches, other._row_caches, strict=True):
            rows.absorb(others)
        for key, length in zip(other._keys, other._lengths, strict=True):
            self._append_row(key, length)
        other._keys, other._row_of, other._lengths, other._lengths_before, other._goes_back = [], {}, [], [], []

    def _append_row(self, key: object, length: int) -> None:
        self._row_of[key] = len(self._keys)
        self._keys.append(key)
        self._lengths.append(length)
        self._lengths_before.append(length)
        self._goes_back.append(False)

    def leave(self, key: object, caches: Sequence[Any]) -> int:
        """Remove a row, and give its text back to the caches that joined. Returns: its tokens."""
        self._settle()
        row = self._row_of[key]
        length = self._lengths[row]
        for rows, (_, single) in zip(self._row_caches, kinds_of(caches), strict=True):
            rows.leave(row, length, single)
        self.drop(key)
        return length

    def drop(self, key: object) -> None:
        """Remove a row and its text."""
        self._settle()
        self._features.pop(key, None)
        row = self._row_of[key]
        longest = max((length for other, length in enumerate(self._lengths) if other != row), default=0)
        for rows in self._row_caches:
            rows.shrink(longest)
            rows.remove(row)
        for column in (self._keys, self._lengths, self._lengths_before, self._goes_back):
            del column[row]
        self._row_of = {other: index for index, other in enumerate(self._keys)}

    def read(self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None) -> None:
        """Process the first tokens of all rows, which are empty, and evaluate their caches; otherwise as `feed`."""
        self.feed(tokens, recorder)
        mx.eval([rows.state for rows in self._row_caches], list(self._features.values()))
        release_buffers()

    def feed(
        self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None
    ) -> dict[object, mx.array]:
        """Process tokens of several rows in one pass: by key, at most `widest_row` ids for each that takes part. An id
        beyond the vocabulary is read as the last id, as in `MLXSequence`. The recorder records the features that a
        trained drafter reads, if there is one.

        Returns: by key, (tokens, V) logits of each row that takes part, lazy.
        """
        self._settle()
        last_id = self._vocab_size - 1
        fed = [tuple(min(token, last_id) for token in tokens.get(key, ())) for key in self._keys]
        widths = [len(row) for row in fed]
        width = max(widths)
        assert 0 < width <= self.widest_row
        padded = mx.array([row + (0,) * (width - len(row)) for row in fed])
        with evaluating(self._layer_evaluation):
            logits = self._forward(padded, widths, recorder)
        self._count(widths)
        return {key: logits[row, : widths[row]] for row, key in enumerate(self._keys) if widths[row] > 0}

    def feed_ahead(self, keys: Sequence[object], tokens: mx.array, recorder: FeatureRecorder | None = None) -> mx.array:
        """Process one token of each row in `keys`, (n,), which may be lazy. Returns: (n, V) logits, lazy."""
        self._settle()
        rows = [self._row_of[key] for key in keys]
        are_all = rows == list(range(len(self)))
        fed, widths = tokens, [1] * len(rows)
        if not are_all:
            fed = mx.zeros((len(self),), tokens.dtype)
            fed[mx.array(rows)] = tokens
            widths = [int(row in rows) for row in range(len(self))]
        # Layers are not evaluated one by one, so that the last pass's tokens can be read while this one is computed.
        logits = self._forward(mx.minimum(fed.astype(mx.int32), self._vocab_size - 1)[:, None], widths, recorder)[:, 0]
        self._count(widths)
        return logits if are_all else logits[mx.array(rows)]

    def _forward(self, tokens: mx.array, widths: Sequence[int], recorder: FeatureRecorder | None) -> mx.array:
        """(B, W, V) logits of a pass over (B, W) ids, of which `widths` are not padding; lazy."""
        for rows in self._row_caches:
            rows.begin(self._lengths, widths)
        with recording(recorder):
            logits: mx.array = self._model(tokens, cache=self._caches)
        self._features = {}
        if recorder is not None:
            features = recorder.take((tokens.shape[0], tokens.shape[1]))
            self._features = {key: features[row, : widths[row]] for row, key in enumerate(self._keys) if widths[row]}
        if max(self._lengths) // STEP != (max(self._lengths) + tokens.shape[1]) // STEP:
            release_buffers()
        return logits

    def _count(self, widths: Sequence[int]) -> None:
        self._lengths_before = list(self._lengths)
        self._lengths = [length + read for length, read in zip(self._lengths, widths, strict=True)]

    def features(self, key: object) -> mx.array | None:
        """(tokens, width) features of a row's part in the last pass, lazy; None if they are not recorded."""
        return self._features.get(key)

    def rewind(self, key: object, length: int) -> int:
        """Drop a row's tokens until at most the first `length` are left. See `CachedSequence.rewind`."""
        row = self._row_of[key]
        if length > self._lengths[row]:
            raise RewindError(f"asked to rewind to {length} tokens a row that holds {self._lengths[row]}")
        if length < self._lengths[row]:
            if not self.is_recurrent:
                self._lengths[row] = length
            elif length >= self._lengths_before[row]:
                self._lengths[row], self._goes_back[row] = self._lengths_before[row], True
            else:
                raise RewindError(
                    f"asked to rewind to {length} tokens a row that can only go back to {self._lengths_before[row]}"
                )
        return self._lengths[row]

    def _settle(self) -> None:
        """Restore the recurrent states of the rows that were rewound."""
        if any(self._goes_back):
            for rows in self._row_caches:
                rows.restore(self._goes_back)
            self._goes_back = [False] * len(self)

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(int(rows.nbytes) for rows in self._row_caches)
