"""A trained drafter behind the interface of `actors.model`, so that the draft actor need not know what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from actors.model import FeedsEach
from actors.trained.kinds.attach import attach
from actors.trained.trained_sequence import TrainedSequence


class TrainedDrafter(FeedsEach):
    """A drafter that was trained for its target, on its own thread, on which it must also be made.

    Attributes:
        target: mlx-lm's model.
        feature_layers, vocab_size, module, num_draft_tokens, arrays: see `Attached`.
    """

    context_length = None
    cache_options: Mapping[str, Any] = {}  # none affect the cached values
    num_ranks = 1

    def __init__(
        self,
        folder: Path,
        target: Module,
        target_vocab_size: int,
        named: str = "the drafter",
        *,
        is_targets_own: bool = False,
        quantize: Mapping[str, Any] | None = None,
    ) -> None:
        """See `attach`."""
        self._load = partial(TrainedDrafter, folder, target, target_vocab_size, named, is_targets_own=is_targets_own)
        attached = attach(folder, target, target_vocab_size, named, is_targets_own=is_targets_own, quantize=quantize)
        self.target, self.feature_layers, self.vocab_size = target, attached.feature_layers, attached.vocab_size
        self.module, self.arrays = attached.module, attached.arrays
        self.num_draft_tokens, self._open_sequence = attached.num_draft_tokens, attached.open_sequence

    def quantized(self, settings: Mapping[str, Any]) -> TrainedDrafter:
        """The same drafter, loaded once more and quantised; see `attach`."""
        return self._load(quantize=settings)

    def open_sequence(self, *, beside_another: bool) -> TrainedSequence:
        return self._open_sequence()

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str:
        return "a trained drafter reads one text at a time"

    @contextmanager
    def evaluating_layers(self) -> Iterator[None]:
        """One layer is evaluated in one go."""
        yield

    @cached_property
    def num_bytes(self) -> int:  # type: ignore[override]
        """Memory of the weights, without those that it shares with the target."""
        weights = [cast(mx.array, pair[1]) for pair in tree_flatten(self.module.parameters())]
        return sum(array.nbytes for array in [*weights, *self.arrays])
