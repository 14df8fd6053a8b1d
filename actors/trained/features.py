"""Features: the hidden states of a target that a trained drafter reads, recorded in the target's forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.layer_evaluation import observing
from actors.trained.positioned_rows import PositionedRows
from protocol.errors import ModelError
from protocol.messages import Features


@attrs.define
class RecorderSlot:
    """The recorder of a model's passes, which its sequences share; None while nobody reads features."""

    recorder: FeatureRecorder | None = None


class RecordedFeatures:
    """See `TextFeatures`."""

    def __init__(self, slot: RecorderSlot) -> None:
        self.slot = slot
        self._is_wanted = True
        self.rows = PositionedRows()  # of the text's last tokens, until they are taken

    @property
    def recorder(self) -> FeatureRecorder | None:
        """Of the next pass; None if nobody reads its features."""
        return self.slot.recorder if self._is_wanted else None

    def want(self, wanted: bool) -> None:
        self._is_wanted = wanted
        if not wanted:
            self.rows.clear()

    def add(self, begin: int, features: mx.array | None) -> None:
        """Add the features of positions from `begin` on, (n, width), lazy; see `PositionedRows.add`."""
        if features is not None and self._is_wanted:
            self.rows.add(begin, features)

    @contextmanager
    def of_pass(self, begin: int, num_tokens: int) -> Iterator[None]:
        """Record the forward pass over this text alone that runs inside the block, from position `begin` on."""
        recorder = self.recorder
        with recording(recorder):
            yield
        if recorder is not None:
            self.add(begin, recorder.take((1, num_tokens))[0])

    def arrays(self) -> list[mx.array]:
        return self.rows.pieces

    def take(self, end: int) -> Features | None:
        begin, end = self.rows.begin, min(end, self.rows.end)
        if end <= begin:
            return None
        # A copy: a slice would keep the buffers of a whole pass.
        taken = Features(begin, mx.contiguous(self.rows.between(begin, end)))
        mx.eval(taken.values)
        self.rows.drop_before(end)
        return taken


class FeatureRecorder:
    """Records the inputs of some layers of a model, while `evaluating_layers` is in force for it."""

    def __init__(self, model: Module, layer_ids: Sequence[int]) -> None:
        """Record what enters layers `layer_ids`, each in [0, number of layers], which means the last output."""
        self._layer_ids = tuple(layer_ids)
        self._index = {id(layer): i for i, layer in enumerate(model.layers)}
        self._seen: dict[int, Any] = {}  # by layer, what has entered it; of the last one, also what it gave

    def observe(self, layer: Module, entered: Any, result: Any) -> None:
        """See `observing`."""
        if (index := self._index.get(id(layer))) in self._layer_ids:
            self._seen[index] = entered
        if index == (last := len(self._index)) - 1 and last in self._layer_ids:
            self._seen[last] = result[0] if isinstance(result, tuple) else result

    def take(self, shape: tuple[int, int]) -> mx.array:
        """(B, W, layers · hidden size) features of the last pass, over (B, W) tokens; lazy. Raises: ModelError."""
        seen, self._seen = self._seen, {}
        parts = [seen.get(layer) for layer in self._layer_ids]
        fitting = [part for part in parts if isinstance(part, mx.array) and part.ndim == 3 and part.shape[:2] == shape]
        if len(fitting) < len(parts):
            raise ModelError(
                "the target cannot have a drafter that reads its hidden states: what enters its layers is not one "
                "vector for each token"
            )
        return mx.concatenate(fitting, axis=-1)


def recording(recorder: FeatureRecorder | None) -> AbstractContextManager[None]:
    """Have a recorder record the forward pass that this thread runs, while in force; None records nothing."""
    return nullcontext() if recorder is None else observing(recorder.observe)
