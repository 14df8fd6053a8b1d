"""A trained drafter behind the interface of `actors.model`, so that the draft actor need not know what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from actors.mlx.row_caches import MAX_WIDTH, STEP
from actors.mlx.shared_passes import is_close
from actors.model import Feed, FeedsEach
from actors.trained.kinds.attach import attach
from actors.trained.shared_reading import read_together
from actors.trained.trained_sequence import TrainedSequence
from protocol.cache_size import CacheSize

_NUM_MEASURED = 16  # tokens of the text whose growth is measured

# The probe's texts: the length at which each is a row, and how many of its tokens the two passes read.
_PROBES = ((3, (2, 1)), (6, (3, 1)))


class TrainedDrafter(FeedsEach):
    """A drafter that was trained for its target, on the thread on which it was made. See `Attached` and `Model`."""

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
        self._load = partial(TrainedDrafter, folder, target, target_vocab_size, named, is_targets_own=is_targets_own)
        attached = attach(folder, target, target_vocab_size, named, is_targets_own=is_targets_own, quantize=quantize)
        self.target, self.feature_layers, self.vocab_size = target, attached.feature_layers, attached.vocab_size
        self.module, self.arrays = attached.module, attached.arrays
        self.num_draft_tokens, self._open_sequence = attached.num_draft_tokens, attached.open_sequence
        self._passes = attached.passes
        self._obstacle: str | None = None if self._passes else "drafters of this kind read one text at a time"
        self._is_probed = self._obstacle is not None
        self.cache_size = self._measured_size()

    def _measured_size(self) -> CacheSize:
        """The growth of a text by one step of its buffers."""
        short, longer = (self._bytes_of(_NUM_MEASURED + more) for more in (0, STEP))
        slot_bytes = -(-(longer - short) // STEP)
        return CacheSize(slot_bytes, (), max(0, short - STEP * slot_bytes), STEP + MAX_WIDTH)

    def _bytes_of(self, num_tokens: int) -> int:
        with closing(self._open_sequence()) as sequence:
            sequence.give_nothing(num_tokens)
            sequence.feed((0,) * num_tokens, 0)
            return sequence.num_bytes

    def quantized(self, settings: Mapping[str, Any]) -> TrainedDrafter:
        """The same drafter, loaded once more and quantised; see `attach`."""
        return self._load(quantize=settings)

    def open_sequence(self, *, beside_another: bool) -> TrainedSequence:
        return self._open_sequence()

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        for each in self._passes:
            each.begin_feed()
        readings = {
            feed.sequence: cast(TrainedSequence, feed.sequence).reading(feed.tokens, feed.num_logits)
            for feed in feeds
            if not feed.alone
        }
        shared = dict(zip(readings, read_together([*readings.values()]), strict=True))
        found = [
            shared[feed.sequence] if feed.sequence in shared else feed.sequence.feed(feed.tokens, feed.num_logits)
            for feed in feeds
        ]
        return [logits for logits in found if logits is not None]

    def abandon_shared(self) -> None:
        for each in self._passes:
            each.abandon()

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        """Feeds the drafter some tokens to find out."""
        if not self._is_probed:
            # Stands if the probe raises.
            self._obstacle, self._is_probed = "its forward pass failed when that was tried", True
            agrees = self._agrees()
            self._obstacle = None if agrees else "it gives other logits for two texts at once than for each alone"
        return self._obstacle

    def _agrees(self) -> bool:
        try:
            alone, together = self._probed(shared=False), self._probed(shared=True)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # whatever a target's layers run into
            return False
        return all(is_close(*pair) for pair in zip(alone, together, strict=True))

    def _probed(self, *, shared: bool) -> list[mx.array]:
        """Logits of two texts of different lengths, over passes of different widths."""
        logits: list[mx.array] = []
        sequences = [self.open_sequence(beside_another=False) for _ in _PROBES]
        for seed, (sequence, (num_read, widths)) in enumerate(zip(sequences, _PROBES, strict=True)):
            shape = (num_read + sum(widths), sequence.feature_width)
            sequence.give(0, mx.random.normal(shape, key=mx.random.key(seed)))
            sequence.feed((0,) * num_read, 0)
        for widths in zip(*(widths for _, widths in _PROBES), strict=True):
            feeds = [
                Feed(sequence, tuple(range(1, width + 1)), 1, alone=not shared)
                for sequence, width in zip(sequences, widths, strict=True)
            ]
            logits += self.feed_together(feeds)
        for sequence in sequences:
            sequence.close()
        return logits

    def evaluating_layers(self) -> AbstractContextManager[None]:
        """One layer is evaluated in one go."""
        return nullcontext()

    @cached_property
    def num_bytes(self) -> int:  # type: ignore[override]
        """Memory of the weights, without those that it shares with the target."""
        weights = [cast(mx.array, pair[1]) for pair in tree_flatten(self.module.parameters())]
        return sum(array.nbytes for array in [*weights, *self.arrays])
