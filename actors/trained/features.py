"""Features: the hidden states of a target that a trained drafter reads, recorded in the target's forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.layer_evaluation import observing
from protocol.errors import ModelError
from protocol.messages import Features


class RecordedFeatures:
    """The features of one text's last tokens, until they are taken."""

    def __init__(self, recorder: FeatureRecorder | None) -> None:
        """Make an empty record.

        Args:
            recorder: of the model's passes over the text; None if nobody reads features.
        """
        self._recorder = recorder
        self._begin = 0
        self._features: mx.array | None = None

    def clear(self) -> None:
        """Drop all."""
        self._begin, self._features = 0, None

    def add(self, begin: int, features: mx.array | None) -> None:
        """Add the features of a pass.

        Args:
            begin: position of its first token.
            features: (n, width), lazy; None if none were recorded.
        """
        if features is None:
            return
        if self._features is None or begin != self._begin + self._features.shape[0]:
            self._begin, self._features = begin, features
        else:
            self._features = mx.concatenate([self._features, features])

    @contextmanager
    def of_pass(self, begin: int, num_tokens: int) -> Iterator[None]:
        """Record the forward pass over this text alone that runs inside the block.

        Args:
            begin: position of its first token.
            num_tokens: of the pass.
        """
        with recording(self._recorder):
            yield
        if self._recorder is not None:
            self.add(begin, self._recorder.take((1, num_tokens))[0])

    def rewind(self, length: int) -> None:
        """Drop those of positions from `length` on."""
        if self._features is not None and length < self._begin + self._features.shape[0]:
            self._features = self._features[: length - self._begin] if length > self._begin else None

    def arrays(self) -> list[mx.array]:
        """What `take` reads, to be evaluated together with something else."""
        return [] if self._features is None else [self._features]

    def take(self, end: int) -> Features | None:
        """Those of positions before `end`, which are kept no longer; None if there are none."""
        if self._features is None or end <= self._begin:
            return None
        num_taken = end - self._begin
        # A copy: a slice would keep the buffers of a whole pass.
        taken = Features(self._begin, mx.contiguous(self._features[:num_taken]))
        mx.eval(taken.values)
        self._features = self._features[num_taken:] if num_taken < self._features.shape[0] else None
        self._begin = end
        return taken


class FeatureRecorder:
    """Records what enters some layers of a model.

    Works on the layers of mlx-lm's classes as they are, while `evaluating_layers` is in force for the model.
    """

    def __init__(self, model: Module, layer_ids: Sequence[int], *, named: str = "the target") -> None:
        """Make a recorder.

        Args:
            model: an mlx-lm language model.
            layer_ids: the layers whose input is recorded, each in [0, number of layers]; that number stands for
                what the last layer gives.
            named: the model, for messages.
        """
        layers = list(model.layers)
        self._named = named
        self._layer_ids = tuple(layer_ids)
        self._index = {id(layer): i for i, layer in enumerate(layers)}
        self._num_layers = len(layers)
        self._seen: dict[int, mx.array] = {}

    def observe(self, layer: Module, entered: Any, result: Any) -> None:
        """Keep what a drafter reads of a layer; see `observing`."""
        index = self._index.get(id(layer))
        if index is None:
            return
        if index in self._layer_ids and isinstance(entered, mx.array):
            self._seen[index] = entered
        if index == self._num_layers - 1 and self._num_layers in self._layer_ids:
            given = result[0] if isinstance(result, tuple) else result
            if isinstance(given, mx.array):
                self._seen[self._num_layers] = given

    def take(self, shape: tuple[int, int]) -> mx.array:
        """The features of the last pass.

        Args:
            shape: (B, W) of its tokens.

        Returns: (B, W, layers · hidden size), lazy.
        Raises: ModelError: a layer gave nothing of the kind, so that the model's features cannot be recorded.
        """
        seen, self._seen = self._seen, {}
        parts = [seen.get(layer) for layer in self._layer_ids]
        fitting = [part for part in parts if part is not None and part.ndim == 3 and part.shape[:2] == shape]
        if len(fitting) < len(parts):
            raise ModelError(
                f"{self._named} cannot have a drafter that reads its hidden states: what enters its layers is not one "
                "vector for each token"
            )
        return mx.concatenate(fitting, axis=-1)


@contextmanager
def recording(recorder: FeatureRecorder | None) -> Iterator[None]:
    """Have a recorder record the forward pass that this thread runs, while in force; None records nothing."""
    if recorder is None:
        yield
        return
    with observing(recorder.observe):
        yield
