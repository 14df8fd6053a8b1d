"""A batch: several texts of one model as rows of shared caches, and forward passes over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.layer_evaluation import LayerEvaluation, evaluating
from actors.mlx.memory import release_buffers
from actors.rows import Rows
from actors.trained.features import FeatureRecorder, recording


class RowBatch(Rows):
    """Rows that an mlx-lm model reads."""

    def __init__(
        self, model: Module, caches: Sequence[Any], layer_evaluation: LayerEvaluation, *, vocab_size: int
    ) -> None:
        super().__init__(caches)
        self._model = model
        self._features: dict[object, mx.array] = {}  # by key: (tokens, width) of the last pass
        self._vocab_size = vocab_size
        self._layer_evaluation = layer_evaluation

    def drop(self, key: object) -> None:
        self._features.pop(key, None)
        super().drop(key)

    def read(self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None) -> None:
        """Process the first tokens of all rows, which are empty, and evaluate their caches; otherwise as `feed`."""
        self.feed(tokens, recorder)
        mx.eval(self.state, list(self._features.values()))
        release_buffers()

    def feed(
        self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None
    ) -> dict[object, mx.array]:
        """Process tokens of rows in one pass: at most `widest_row` ids of each, beyond the vocabulary read as the last.

        Returns: by key, (tokens, V) logits of each row that takes part, lazy.
        """
        last_id = self._vocab_size - 1
        fed = [tuple(min(token, last_id) for token in tokens.get(key, ())) for key in self.keys]
        widths = {key: len(row) for key, row in zip(self.keys, fed, strict=True)}
        width = max(widths.values())
        padded = mx.array([row + (0,) * (width - len(row)) for row in fed])
        with evaluating(self._layer_evaluation):
            logits = self.run(widths, partial(self._forward, padded, widths, recorder))
        return {key: logits[row, : widths[key]] for row, key in enumerate(self.keys) if widths[key] > 0}

    def feed_ahead(self, keys: Sequence[object], tokens: mx.array, recorder: FeatureRecorder | None = None) -> mx.array:
        """Process one token of each row in `keys`, (n,), which may be lazy. Returns: (n, V) logits, lazy."""
        rows = [self._row_of[key] for key in keys]
        are_all = rows == list(range(len(self)))
        fed = tokens
        if not are_all:
            fed = mx.zeros((len(self),), tokens.dtype)
            fed[mx.array(rows)] = tokens
        ids = mx.minimum(fed.astype(mx.int32), self._vocab_size - 1)[:, None]
        widths = dict.fromkeys(keys, 1)
        # Layers are not evaluated one by one, so that the last pass's tokens can be read while this one is computed.
        logits = self.run(widths, partial(self._forward, ids, widths, recorder))[:, 0]
        return logits if are_all else logits[mx.array(rows)]

    def _forward(
        self, tokens: mx.array, widths: Mapping[object, int], recorder: FeatureRecorder | None, caches: list[Any]
    ) -> mx.array:
        """(B, W, V) logits of a pass over (B, W) ids, of which `widths` are not padding; lazy."""
        with recording(recorder):
            logits: mx.array = self._model(tokens, cache=caches)
        self._features = {}
        if recorder is not None:
            features = recorder.take((tokens.shape[0], tokens.shape[1]))
            taken = ((row, key, widths.get(key, 0)) for row, key in enumerate(self.keys))
            self._features = {key: features[row, :width] for row, key, width in taken if width > 0}
        return logits

    def features(self, key: object) -> mx.array | None:
        """(tokens, width) features of a row's part in the last pass, lazy; None if they are not recorded."""
        return self._features.get(key)
