"""A trained drafter behind the interface of `actors.model`, so that the draft actor need not know what it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.model import weights_of
from actors.mlx.row_caches import MAX_WIDTH, STEP
from actors.mlx.shared_passes import is_close
from actors.model import Feed, FeedsEach
from actors.trained.drafter_files import DrafterFiles, check_named_target
from actors.trained.kinds.dflash import attach_dflash
from actors.trained.kinds.eagle3 import attach_eagle3
from actors.trained.kinds.gemma4_assistant import attach_gemma4_assistant
from actors.trained.kinds.medusa import attach_medusa
from actors.trained.kinds.mtp import attach_mtp
from actors.trained.kinds.recognition import kind_of
from actors.trained.kinds.target_parts import Attached
from actors.trained.shared_reading import read_together
from actors.trained.trained_sequence import TrainedSequence
from protocol.cache_size import CacheSize
from protocol.errors import ModelError

# By the name from `kind_of`: loads a drafter's files, and attaches it to mlx-lm's model, given the width of its logits.
_KINDS: dict[str, Callable[[DrafterFiles, Module, int], Attached]] = {
    "EAGLE-3": attach_eagle3,
    "P-EAGLE": attach_eagle3,
    "MTP": attach_mtp,
    "Medusa": attach_medusa,
    "DFlash": attach_dflash,
    "DFlash 2": attach_dflash,
    "DSpark": attach_dflash,
    "Gemma 4's assistant": attach_gemma4_assistant,
}
SUPPORTED = tuple(_KINDS)

_NUM_MEASURED = 16  # tokens of the text whose growth is measured

# The probe's texts: the length at which each is a row, and how many of its tokens the two passes read.
_PROBES = ((3, (2, 1)), (6, (3, 1)))


class TrainedDrafter(FeedsEach):
    """A drafter of any kind that was trained for its target, on the thread on which it was made. See `Model`."""

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
        """Load the drafter in a folder, which messages call `named`, for mlx-lm's model, whose weights are evaluated
        and whose logits have a width of `target_vocab_size`. If `is_targets_own`, it is the MTP layer in the target's
        own folder. To `quantize` its weights takes `bits`, `group_size` and `mode`.

        Raises: ModelError: it cannot be loaded, or was made for another target; the message says what differs.
        """
        self._load = partial(TrainedDrafter, folder, target, target_vocab_size, named, is_targets_own=is_targets_own)
        files = DrafterFiles.read(folder, named, quantize)
        check_named_target(files.config, target, named)
        kind = "MTP" if is_targets_own else kind_of(files.config)
        if kind not in _KINDS:
            raise ModelError(
                f"{named} is no trained drafter of a kind that can be used ({', '.join(_KINDS)}), but "
                f"{kind or 'none at all'}"
            )
        attached = _KINDS[kind](files, target, target_vocab_size)
        self.target, self.feature_layers, self.vocab_size = target, attached.feature_layers, attached.vocab_size
        self.module, self.arrays = attached.module, attached.arrays
        self.num_draft_tokens, self._open_sequence = attached.num_draft_tokens, attached.open_sequence
        self._passes = attached.passes
        self._obstacle: str | None = None if self._passes else "drafters of this kind read one text at a time"
        self._is_probed = self._obstacle is not None
        # The growth of a text by one step of its buffers.
        short, longer = (self._bytes_of(_NUM_MEASURED + more) for more in (0, STEP))
        slot_bytes = -(-(longer - short) // STEP)
        self.cache_size = CacheSize(slot_bytes, (), max(0, short - STEP * slot_bytes), STEP + MAX_WIDTH)

    def _bytes_of(self, num_tokens: int) -> int:
        with closing(self._open_sequence()) as sequence:
            sequence.give_nothing(num_tokens)
            sequence.feed((0,) * num_tokens, 0)
            return sequence.num_bytes

    def quantized(self, settings: Mapping[str, Any]) -> TrainedDrafter:
        """The same drafter, loaded once more and quantised."""
        return self._load(quantize=settings)

    def open_sequence(self, *, alongside_model: bool) -> TrainedSequence:
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
            try:
                pairs = zip(self._probed(shared=False), self._probed(shared=True), strict=True)
                agrees = all(is_close(*pair) for pair in pairs)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # from the target's layers
                agrees = False
            self._obstacle = None if agrees else "it gives other logits for two texts at once than for each alone"
        return self._obstacle

    def _probed(self, *, shared: bool) -> list[mx.array]:
        """Logits of two texts of different lengths, over passes of different widths."""
        logits: list[mx.array] = []
        sequences = [self.open_sequence(alongside_model=False) for _ in _PROBES]
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

    evaluating_layers = nullcontext  # one layer is evaluated in one go

    @cached_property
    def num_bytes(self) -> int:  # type: ignore[override]
        """Memory of the weights, without those that it shares with the target."""
        return sum(array.nbytes for array in (*weights_of(self.module).values(), *self.arrays))
