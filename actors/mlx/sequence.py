"""One text in the caches of an mlx-lm model: fed, rewound, reused by other texts, and saved in files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from actors.mlx.cache_kinds import LayerState, MisfitError, Restore, State, kind_of, kinds_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating, handing_on_last, hands_on_rows
from actors.mlx.memory import release_buffers
from actors.mlx.sequence_state import PrefixCheckpointState, SequenceState, StatefulSequence
from actors.model import ReusableSequence, RewindMode
from actors.rows import Rows, RowText
from actors.trained.features import RecordedFeatures, RecorderSlot
from protocol.cache_size import LEAST_PREFIX_CHECKPOINTS, MAX_CHECKPOINT_BYTES, MAX_PREFIX_CHECKPOINTS
from protocol.errors import RewindError
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS

S = TypeVar("S", bound="MLXSequence")


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
        self._always_trims = options.always_trims(self.cache)
        self._model = model
        self.recorded = RecordedFeatures(recorder_slot or RecorderSlot())
        self._options = options
        self._vocab_size = vocab_size
        self.layer_evaluation = layer_evaluation
        self._checkpoints: list[Checkpoint] = []  # for rewinds after a round, by length, ascending
        self._prefix_checkpoints: list[PrefixCheckpointState] = []  # likewise; for other texts
        self._quantized_at: int | None = None  # the length at which the caches were quantised; None if they are not
        self._stored: StoredTokens | None = None  # what was taken out of the caches, while nobody works on the text

    @property
    def features(self) -> RecordedFeatures | None:
        return None if self.recorded.slot.recorder is None else self.recorded

    # --- as a row of a batch ---------------------------------------------------------------------

    @property
    def can_be_row(self) -> bool:
        options = self._options
        if options.rewind != "auto" or options.kv_bits is not None or options.one_by_one:
            return False
        return super().can_be_row

    reads_with_others = True

    @property
    def computes_all_logits(self) -> bool:
        return not hands_on_rows(self._model)

    def join(self, batch: Rows) -> None:
        super().join(batch)
        # A row goes back to where it was before its last pass, and no further.
        self._checkpoints.clear()

    def forget(self) -> None:
        """Also leaves its batch, without telling it: that batch must be given up."""
        self.cache = self._options.make_cache(self._model)
        self.batch, self._length, self._quantized_at = None, 0, None
        self.recorded.rows.clear()
        self._checkpoints, self._prefix_checkpoints = [], []

    def count_row(self) -> None:
        assert self.batch is not None
        self.recorded.add(self.length, self.batch.features(self))
        super().count_row()

    # --- alone ------------------------------------------------------------------------------------

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        self.leave_batch()
        if num_logits == 0:
            self._forward(tokens)
            for kind, layer in kinds_of(self.cache):
                kind.compact(layer)
            mx.eval([layer.state for layer in self.cache], self.recorded.arrays())
            release_buffers()
            return None
        passes = [tokens] if self._always_trims else self._options.passes(self.cache, self._length, tokens)
        last_alone = num_logits == 1 < len(tokens) and not self.computes_all_logits
        with handing_on_last() if last_alone else nullcontext():
            logits_of_passes = [self._forward(pass_tokens) for pass_tokens in passes]
        logits = logits_of_passes[0] if len(passes) == 1 else mx.concatenate(logits_of_passes)
        return logits[-num_logits:]

    def feed_lazy(self, token: mx.array) -> mx.array:
        if self.batch is not None:
            self.leave_batch()
        with self._recording(1):
            logits: mx.array = self._model(token[None], cache=self.cache)
        self._grow(1)
        return logits[0]

    def _forward(self, tokens: tuple[int, ...]) -> mx.array:
        """(len(tokens), V) logits, lazy."""
        # A drafter may have a smaller vocabulary than its target, and an index out of bounds would read other memory.
        known = [min(token, self._vocab_size - 1) for token in tokens]
        with evaluating(self.layer_evaluation), self._recording(len(tokens)):
            logits: mx.array = self._model(mx.array([known]), cache=self.cache)
        self._grow(len(tokens))
        return logits[0]

    def _recording(self, num_tokens: int) -> AbstractContextManager[None]:
        return nullcontext() if self.features is None else self.recorded.of_pass(self.length, num_tokens)

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        if self.batch is not None:
            return RewindMode.CHECKPOINT if self.batch.is_recurrent else RewindMode.TRIM
        if self._always_trims:
            return RewindMode.TRIM
        rewind_mode = self._options.rewind_mode(self.cache, self._length, num_tokens, settled)
        last = self._checkpoints[-1].length if self._checkpoints else -1
        if rewind_mode is RewindMode.CHECKPOINT and last < self._length:
            self._checkpoints.append(self._make_checkpoint())
        # No rewind can need the checkpoints below the last one at or below `settled`.
        while len(self._checkpoints) > 1 and self._checkpoints[1].length <= settled:
            del self._checkpoints[0]
        return rewind_mode

    def rewind(self, length: int) -> int:
        if self.batch is not None:
            self._length = self.batch.rewind(self, length)
            self.recorded.rows.drop_from(self.length)
            return self._length
        if length > self._length:
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self._length}")
        if length < self._length:
            if self._always_trims or self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._rewind_to_checkpoint(length)
            self._drop_checkpoints_ahead()
            if self.recorded.rows.pieces:
                self.recorded.rows.drop_from(self.length)
        self.check_caches(self._length)
        return self._length

    def check(self, length: int) -> None:
        self.check_caches(length)

    def check_caches(self, length: int) -> None:
        # This runs after every pass, so caches that count their tokens are looked at first, without their kinds.
        if self.batch is not None or {getattr(layer, "offset", None) for layer in self.cache} != {length}:
            super().check_caches(length)

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if a cache is of an unknown class."""
        self.leave_batch()
        self.check_caches(len(tokens))
        if not tokens or not self._keep_states:
            return None
        with self._put_back():
            layers = tuple(kind_of(layer).take_state(layer) for layer in self.cache)
        shorter = tuple(each for each in self._prefix_checkpoints if each.length < len(tokens))
        return SequenceState(tokens, layers, shorter, quantized_at=self._quantized_at)

    @property
    def _keep_states(self) -> bool:
        return all(kind.can_keep_state for kind, _ in kinds_of(self.cache))

    def put_state(self, state: SequenceState) -> None:
        state.check(num_layers=len(self.cache))
        grown = (self._options.grown_cache(self._model, n, quantized=state.is_quantized) for n in (1, 8))
        like = [*zip(*grown, strict=True)]
        empty = self.cache
        try:
            self.cache = [
                kind_of(pair[0]).put_state(taken, *pair) for taken, pair in zip(state.layers, like, strict=True)
            ]
            self.check_caches(len(state.tokens))
            for checkpoint in state.prefix_checkpoints:
                for taken, layer, pair in zip(checkpoint.layers, self.cache, like, strict=True):
                    kind_of(layer).check_prefix_checkpoint(taken, checkpoint.length, layer, *pair)
        except (MisfitError, RewindError):
            self.cache = empty
            raise
        self._length, self._quantized_at = len(state.tokens), state.quantized_at
        self._prefix_checkpoints = list(state.prefix_checkpoints)

    @property
    def can_copy(self) -> bool:  # type: ignore[override]
        """Whether all caches are of known classes."""
        return self._keep_states

    def copy(self, length: int) -> MLXSequence:
        """They share memory until either is fed."""
        return self._copied_to(self._empty_alike(), length)

    def _empty_alike(self: S) -> S:
        return type(self)(
            self._model,
            self._options,
            vocab_size=self._vocab_size,
            layer_evaluation=self.layer_evaluation,
            recorder_slot=self.recorded.slot,
        )

    def _copied_to(self, copy: S, length: int) -> S:
        if self.batch is not None:
            copy._length = self.batch.copy_to(self, copy.cache)
        else:
            round = self._round_checkpoint(length)
            present = None if round is None else self._make_checkpoint()
            if round is not None:
                self._restore(round)
            with self._put_back():
                copy.cache, copy._length = [kind_of(layer).copied(layer) for layer in self.cache], self._length
            if present is not None:
                self._restore(present)
        copy._prefix_checkpoints, copy._quantized_at = list(self._prefix_checkpoints), self._quantized_at
        copy.reuse(length)
        # Without what lies beyond its length, which would be copied with the rest when the sequence is next fed.
        copy.cache = [kind_of(layer).copied(layer) for layer in copy.cache]
        return copy

    def close(self) -> None:
        if self.batch is not None:
            self.batch.drop(self)
            self.batch = None
        self.cache, self._stored = [], None
        self._checkpoints, self._prefix_checkpoints = [], []

    @property
    def num_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def memory(self) -> Mapping[int, int]:
        self.leave_batch()
        layers = [(kind, layer) for kind, layer in kinds_of(self.cache) if not layer.empty()]
        num_bytes = sum(int(layer.nbytes) for _, layer in layers)
        num_bytes += len(self._checkpoints) * sum(kind.checkpoint_bytes(layer) for kind, layer in layers)
        shared = {} if self._stored is None else self._stored.memory
        checkpoints = {id(each): sum(layer.num_bytes for layer in each.layers) for each in self._prefix_checkpoints}
        return {id(self): num_bytes, **shared, **checkpoints}

    def share(self, other: ReusableSequence, num_common: int) -> None:
        if not isinstance(other, MLXSequence) or other._quantized_at != self._quantized_at:
            return
        for each in (self, other):
            each._stored = each._stored or StoredTokens(each.cache, each._length)
        assert self._stored is not None
        assert other._stored is not None
        if self._stored.places == other._stored.places:
            self._stored.share(other._stored, num_common)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Have all in the caches within a block."""
        if self._stored is not None:
            self._stored.put_back()
        try:
            yield
        finally:
            if self._stored is not None:
                self._stored.take_out()

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
        checkpoints = self._prefix_checkpoints
        if checkpoints and checkpoints[-1].length >= self._length:
            return
        layers = tuple(kind_of(layer).take_prefix_checkpoint(layer) for layer in self.cache)
        mx.eval([layer.arrays for layer in layers])
        checkpoints.append(PrefixCheckpointState(self._length, layers))
        num_bytes = sum(layer.num_bytes for layer in layers)
        fitting = max(LEAST_PREFIX_CHECKPOINTS, MAX_CHECKPOINT_BYTES // max(1, num_bytes))
        most = min(MAX_PREFIX_CHECKPOINTS, fitting)
        while len(checkpoints) > most:
            # The one without which least must be read again, wherever a text parts; the newest stay.
            lengths = [0, *(each.length for each in checkpoints)]
            del checkpoints[min(range(len(checkpoints) - 2), key=lambda i: lengths[i + 2] - lengths[i])]

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        if self._quantized_at is not None:
            quantizes_alike = self._quantized_at == self._options.quantized_at(num_read, pass_tokens)
            return min(num_common, self._length) if quantizes_alike and num_common >= self._quantized_at else 0
        if not self._options.reads_alike(self.cache, num_read):
            return 0
        if self._length <= num_common and self.batch is None:
            return self._length
        can_trim = (
            self._options.can_trim(self.cache, 0, num_common) if self.batch is None else self.batch.rewinds_passes
        )
        if can_trim:
            return min(num_common, self._length)
        lengths = [each.length for each in self._checkpoints] + [each.length for each in self._prefix_checkpoints]
        return max((length for length in lengths if length <= num_common), default=0)

    def shared_from(self, num_read: int, pass_tokens: int) -> int | None:
        if self._options.kv_bits is None or not self._options.reads_alike(self.cache, num_read):
            return super().shared_from(num_read, pass_tokens)
        quantized_at = self._options.quantized_at(num_read, pass_tokens)
        return quantized_at if quantized_at <= num_read else 0

    def reuse(self, length: int) -> None:
        self.leave_batch()
        if self._stored is not None:
            self._stored.put_back()
            self._stored = None
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            elif (round := self._round_checkpoint(length)) is not None:
                self._restore(round)
            else:
                (checkpoint,) = (each for each in self._prefix_checkpoints if each.length == length)
                for layer, taken in zip(self.cache, checkpoint.layers, strict=True):
                    kind_of(layer).go_back(layer, taken)
                self._length = length
        self._checkpoints.clear()
        self._drop_checkpoints_ahead()
        self.recorded.rows.drop_from(length)
        self.check_caches(length)
        if self.needs_prefix_checkpoints:
            self.add_prefix_checkpoint()  # a third text may part here, too

    def _round_checkpoint(self, length: int) -> Checkpoint | None:
        return next((each for each in self._checkpoints if each.length == length), None)

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

    def _grow(self, num_tokens: int) -> None:
        """Count tokens that were fed, and quantise the caches if it is time."""
        old_length, self._length = self._length, self._length + num_tokens
        if self._options.kv_bits is not None and self._options.quantize(self.cache, self._length):
            self._quantized_at = self._length
            # The checkpoints belong to the caches that were replaced.
            self._checkpoints.clear()
            self._prefix_checkpoints.clear()
        # Caches grow in steps of 256 tokens, and MLX would keep each outgrown buffer for later use.
        if old_length // 256 != self._length // 256:
            release_buffers()


# --- texts that nobody works on -------------------------------------------------------------------


@attrs.frozen(eq=False)
class _Part:
    """Successive tokens of a text in some layers. Its arrays may have room for more, and are never assigned to."""

    layers: Sequence[State]

    def cut(self, begin: int, end: int) -> _Part:
        """Some of the tokens, in arrays of their own."""
        return _Part(tree_map(lambda array: mx.contiguous(array[..., begin:end, :]), self.layers))

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return LayerState("", tuple(self.layers)).num_bytes


class StoredTokens:
    """Keys and values of one text, taken out of the caches (at `places`) that have a slot for each token."""

    def __init__(self, caches: Sequence[Any], num_tokens: int) -> None:
        """Take them out of the caches of a text of so many tokens."""
        found = {
            place: layer
            for place, (kind, layer) in enumerate(kinds_of(caches))
            if kind.has_slots and not layer.empty() and layer.offset == num_tokens
        }
        self.places, self._layers = tuple(found), tuple(found.values())
        self._parts = [(_Part([(layer.keys, layer.values) for layer in self._layers]), num_tokens)]
        self.take_out()

    def take_out(self) -> None:
        """Take them out again, after `put_back`."""
        for layer in self._layers:
            layer.keys = layer.values = None

    def put_back(self) -> None:
        """Put them into the caches, in arrays of the text alone, which are computed once they are needed."""

        def joined(*arrays: mx.array) -> mx.array:
            used = [array[..., :length, :] for array, (_, length) in zip(arrays, self._parts, strict=True)]
            return mx.concatenate(used, axis=-2)

        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = tree_map(joined, *(part.layers[index] for part, _ in self._parts))

    def share(self, other: StoredTokens, num_common: int) -> None:
        """Have the first tokens, which are those of another text, too, in common with it: `places` must be the same."""
        beginning, own = other._cut_at(num_common), self._cut_at(num_common)
        self._parts = [*beginning, *self._parts[len(own) :]]
        for index in range(len(self._layers)):  # one by one, so that little is in memory twice
            mx.eval([part.layers[index] for part, _ in (*self._parts, *other._parts)])

    def _cut_at(self, length: int) -> list[tuple[_Part, int]]:
        """The parts with the first tokens. The last part, which no other text has, is cut in two where these end."""
        found = []
        for index, (part, num_tokens) in enumerate(self._parts):
            if 0 < length < num_tokens and index == len(self._parts) - 1:
                rest = part.cut(length, num_tokens), num_tokens - length
                part, num_tokens = part.cut(0, length), length
                self._parts[index:] = [(part, num_tokens), rest]
            if length > 0:
                found.append((part, min(num_tokens, length)))
            length -= num_tokens
        return found

    @property
    def memory(self) -> Mapping[int, int]:
        """The bytes of each part, by its id."""
        return {id(part): part.num_bytes for part, _ in self._parts}
