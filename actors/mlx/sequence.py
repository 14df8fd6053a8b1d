"""One text in the caches of an mlx-lm model: fed, rewound, reused by other texts, and saved in files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_kinds import LayerState, MisfitError, Restore, kind_of, kinds_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating
from actors.mlx.memory import release_buffers
from actors.mlx.row_batch import RowBatch
from actors.mlx.sequence_state import PrefixCheckpointState, SequenceState, StatefulSequence
from actors.model import Fork, RewindMode
from actors.rows.row_text import RowText
from actors.rows.rows import Rows
from actors.trained.features import RecordedFeatures, RecorderSlot
from protocol.errors import RewindError


@attrs.frozen
class Checkpoint:
    """Restores a sequence's caches to when they held `length` tokens."""

    length: int
    restores: list[Restore]


class MLXSequence(RowText, StatefulSequence):
    """One text in the caches of an mlx-lm model. Most models have a cache for each layer."""

    def __init__(
        self,
        model: Module,
        options: CacheOptions,
        *,
        vocab_size: int,
        layer_evaluation: LayerEvaluation = LayerEvaluation.WHOLE,
        recorder_slot: RecorderSlot | None = None,
    ) -> None:
        """Make an empty sequence. The slot holds the recorder of the model's features, while there is one."""
        super().__init__(options.make_cache(model))
        self._model = model
        self._features = RecordedFeatures(recorder_slot or RecorderSlot())
        self._options = options
        self._vocab_size = vocab_size
        self.layer_evaluation = layer_evaluation
        self._checkpoints: list[Checkpoint] = []  # for rewinds after a round, by length, ascending
        self._prefix_checkpoints: list[Checkpoint] = []  # likewise; for other texts
        self._is_quantized = False

    @property
    def features(self) -> RecordedFeatures:
        return self._features

    # --- as a row of a batch ---------------------------------------------------------------------

    @property
    def can_be_row(self) -> bool:
        options = self._options
        if options.rewind != "auto" or options.kv_bits is not None or options.one_by_one:
            return False
        return super().can_be_row

    reads_with_others = True

    def join(self, batch: Rows) -> None:
        super().join(batch)
        # A row goes back to where it was before its last pass, and no further.
        self._checkpoints.clear()

    def forget(self) -> None:
        """Also leaves its batch, without telling it: that batch must be given up."""
        self.cache = self._options.make_cache(self._model)
        self.batch, self._length, self._is_quantized = None, 0, False
        self.features.clear()
        self._checkpoints, self._prefix_checkpoints = [], []

    def count_row(self) -> None:
        assert isinstance(self.batch, RowBatch)
        self.features.add(self.length, self.batch.features(self))
        super().count_row()

    # --- alone ------------------------------------------------------------------------------------

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self.leave_batch()
        if num_logits == 0:
            self._forward(tokens)
            mx.eval([layer.state for layer in self.cache], self.features.arrays())
            release_buffers()
            return None
        passes = self._options.passes(self.cache, self._length, tokens)
        logits_of_passes = [self._forward(pass_tokens) for pass_tokens in passes]
        logits = logits_of_passes[0] if len(passes) == 1 else mx.concatenate(logits_of_passes)
        return logits[-num_logits:]

    def feed_lazy(self, token: mx.array) -> mx.array:
        self.leave_batch()
        with self.features.of_pass(self.length, 1):
            logits: mx.array = self._model(token[None], cache=self.cache)
        self._grow(1)
        return logits[0]

    def _forward(self, tokens: tuple[int, ...]) -> mx.array:
        """(len(tokens), V) logits, lazy."""
        # A drafter may have a smaller vocabulary than its target, and an index out of bounds would read other memory.
        known = [min(token, self._vocab_size - 1) for token in tokens]
        with evaluating(self.layer_evaluation), self.features.of_pass(self.length, len(tokens)):
            logits: mx.array = self._model(mx.array([known]), cache=self.cache)
        self._grow(len(tokens))
        return logits[0]

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        if self.batch is not None:
            return RewindMode.CHECKPOINT if self.batch.is_recurrent else RewindMode.TRIM
        rewind_mode = self._options.rewind_mode(self.cache, self._length, num_tokens, settled)
        last = self._checkpoints[-1].length if self._checkpoints else -1
        if rewind_mode is RewindMode.CHECKPOINT and last < self._length:
            self._checkpoints.append(self._make_checkpoint())
        self._forget_below(settled)
        return rewind_mode

    def rewind(self, length: int) -> int:
        if self.batch is not None:
            self._length = self.batch.rewind(self, length)
            self.features.rewind(self.length)
            return self._length
        if length > self._length:
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self._length}")
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._rewind_to_checkpoint(length)
        self._drop_checkpoints_ahead()
        self.features.rewind(self.length)
        self.check_caches(self._length)
        return self._length

    def check(self, length: int) -> None:
        self.check_caches(length)

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if a cache is of an unknown class."""
        self.leave_batch()
        self.check_caches(len(tokens))
        if not tokens or not self._keep_states:
            return None
        layers = tuple(kind_of(layer).take_state(layer) for layer in self.cache)
        return SequenceState(tokens, layers, tuple(self._take_prefix_checkpoints()))

    @property
    def _keep_states(self) -> bool:
        return all(kind.can_keep_state for kind, _ in kinds_of(self.cache))

    def _take_prefix_checkpoints(self) -> Iterator[PrefixCheckpointState]:
        present = self._make_checkpoint()
        for length, checkpoint in sorted({c.length: c for c in self._all_checkpoints()}.items()):
            self._restore(checkpoint)
            layers = tuple(kind_of(layer).take_prefix_checkpoint(layer) for layer in self.cache)
            yield PrefixCheckpointState(length, layers)
        self._restore(present)

    def put_state(self, state: SequenceState) -> None:
        state.check(num_layers=len(self.cache))
        is_quantized = any(layer.is_quantized for layer in state.layers)
        grown = (self._options.grown_cache(self._model, n, quantized=is_quantized) for n in (1, 8))
        like = [*zip(*grown, strict=True)]
        empty = self.cache
        try:
            self.cache = [
                kind_of(pair[0]).put_state(taken, *pair) for taken, pair in zip(state.layers, like, strict=True)
            ]
            self.check_caches(len(state.tokens))
            for checkpoint in state.prefix_checkpoints:
                restores = [
                    kind_of(layer).put_prefix_checkpoint(taken, checkpoint.length, layer, *pair)
                    for taken, layer, pair in zip(checkpoint.layers, self.cache, like, strict=True)
                ]
                self._prefix_checkpoints.append(Checkpoint(checkpoint.length, restores))
        except (MisfitError, RewindError):
            self.cache, self._prefix_checkpoints = empty, []
            raise
        self._length = len(state.tokens)
        self._is_quantized = is_quantized

    @property
    def fork_point(self) -> Callable[[], Fork] | None:
        """Forks share memory with this sequence until either is fed."""
        # A quantised cache is of another class than the one that a new sequence begins with.
        return self._fork_point if self._options.kv_bits is None and self._keep_states else None

    def _fork_point(self) -> Fork:
        state = self.take_state((0,) * self._length)
        assert state is not None, "the caches can be copied, and there are tokens"
        mx.eval([layer.arrays for layer in state.all_layers])
        make = partial(
            MLXSequence,
            self._model,
            self._options,
            vocab_size=self._vocab_size,
            layer_evaluation=self.layer_evaluation,
            recorder_slot=self.features.slot,
        )
        return lambda: make()._filled(state)

    def _filled(self, state: SequenceState) -> MLXSequence:
        for checkpoint in state.prefix_checkpoints:
            self._fill(checkpoint.layers, checkpoint.length)
            self._prefix_checkpoints.append(self._make_checkpoint())
        self._fill(state.layers, len(state.tokens))
        self.check_caches(self._length)
        return self

    def _fill(self, layers: Sequence[LayerState], length: int) -> None:
        for layer, taken in zip(self.cache, layers, strict=True):
            kind_of(layer).fill(layer, taken)
        self._length = length

    def close(self) -> None:
        if self.batch is not None:
            self.batch.drop(self)
            self.batch = None
        self.cache = []
        self._checkpoints, self._prefix_checkpoints = [], []

    @property
    def num_bytes(self) -> int:
        self.leave_batch()
        bytes_per_checkpoint = sum(kind.checkpoint_bytes(layer) for kind, layer in kinds_of(self.cache))
        return sum(int(layer.nbytes) for layer in self.cache) + len(self._all_checkpoints()) * bytes_per_checkpoint

    @property
    def needs_prefix_checkpoints(self) -> bool:
        # Prefill ends a pass at each prefix checkpoint, which would change the content of such caches.
        if self.depends_on_passes:
            return False
        always_trims = all(kind.always_trims for kind, _ in kinds_of(self.cache))
        return not always_trims and self._options.can_checkpoint(self.cache)

    @property
    def depends_on_passes(self) -> bool:
        # Caches are quantised at the end of a pass, and some caches read several tokens differently from single ones.
        return self._options.kv_bits is not None or not self._options.reads_alike(self.cache, sys.maxsize)

    def add_prefix_checkpoint(self) -> None:
        self.leave_batch()
        if not self._prefix_checkpoints or self._prefix_checkpoints[-1].length < self._length:
            self._prefix_checkpoints.append(self._make_checkpoint())

    def reusable_length(self, num_common: int, num_read: int) -> int:
        self.leave_batch()
        # Another text may quantise its caches at another length.
        if self._is_quantized or not self._options.reads_alike(self.cache, num_read):
            return 0
        if self._length <= num_common:
            return self._length
        if self._options.can_trim(self.cache, 0, num_common):
            return num_common
        return max((c.length for c in self._all_checkpoints() if c.length <= num_common), default=0)

    def reuse(self, length: int) -> None:
        self.leave_batch()
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._restore(next(c for c in self._all_checkpoints() if c.length == length))
        self._checkpoints.clear()
        self._drop_checkpoints_ahead()
        self.check_caches(length)

    def _all_checkpoints(self) -> tuple[Checkpoint, ...]:
        return (*self._checkpoints, *self._prefix_checkpoints)

    def _make_checkpoint(self) -> Checkpoint:
        return Checkpoint(self._length, [kind.snapshot(layer) for kind, layer in kinds_of(self.cache)])

    def _restore(self, checkpoint: Checkpoint) -> None:
        for restore in checkpoint.restores:
            restore()
        self._length = checkpoint.length

    def _drop_checkpoints_ahead(self) -> None:
        self._checkpoints = [c for c in self._checkpoints if c.length <= self._length]
        self._prefix_checkpoints = [c for c in self._prefix_checkpoints if c.length <= self._length]

    def _rewind_to_checkpoint(self, length: int) -> None:
        """Restore the last checkpoint at or below a length."""
        below = [c for c in self._checkpoints if c.length <= length]
        # If there is none, the tokens up to the first checkpoint were fed while the cache could be trimmed. A cache
        # that cannot be trimmed any more (a rotating one that filled) can be trimmed again once it is back there.
        nearest = below[-1:] or self._checkpoints[:1]
        if nearest:
            self._restore(nearest[0])
        if self._length > length:
            if not self._options.can_trim(self.cache, 0, length):
                raise RewindError(
                    f"asked to rewind to {length} tokens a cache that holds {self._length}, which cannot be trimmed "
                    f"and has checkpoints at {[checkpoint.length for checkpoint in self._checkpoints]}"
                )
            self._trim(length)

    def _trim(self, length: int) -> None:
        for kind, layer in kinds_of(self.cache):
            kind.trim(layer, self._length - length)
        self._length = length

    def _forget_below(self, settled: int) -> None:
        """Drop checkpoints that no rewind can need: all below the last one at or below `settled`."""
        while len(self._checkpoints) > 1 and self._checkpoints[1].length <= settled:
            del self._checkpoints[0]

    def _grow(self, num_tokens: int) -> None:
        """Count tokens that were fed, and quantise the caches if it is time."""
        old_length, self._length = self._length, self._length + num_tokens
        if self._options.quantize(self.cache, self._length):
            self._is_quantized = True
            # The checkpoints belong to the caches that were replaced.
            self._checkpoints.clear()
            self._prefix_checkpoints.clear()
        # Caches grow in steps of 256 tokens, and MLX would keep each outgrown buffer for later use.
        if old_length // 256 != self._length // 256:
            release_buffers()
