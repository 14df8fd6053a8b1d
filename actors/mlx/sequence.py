"""One text in the caches of an mlx-lm model: fed, rewound, kept for other texts, and put into files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_options import CacheOptions
from actors.mlx.cache_rewind import Restore, can_always_trim, checkpoint_bytes, lengths, snapshot, trim
from actors.mlx.cache_state import (
    MisfitError,
    can_take_state,
    put_prefix_checkpoint,
    put_state,
    take_prefix_checkpoint,
    take_state,
)
from actors.mlx.layer_evaluation import evaluate_in_slices
from actors.mlx.memory import release_buffers
from actors.mlx.sequence_state import PrefixCheckpointState, SequenceState
from actors.model import RewindMode
from protocol.errors import RewindError


class MLXSequence:
    """One text in the caches of an mlx-lm model."""

    def __init__(self, model: Module, options: CacheOptions, *, vocab_size: int, in_slices: bool) -> None:
        """An empty line; its caches are in `cache`, a layer each, or less or more as the model has it.

        Args:
            model: whose caches to make.
            options: of the caches, and how they may be rewound.
            vocab_size: ids below it are known to the model.
            in_slices: whether to evaluate layer by layer.
        """
        self._model = model
        self._options = options
        self._vocab_size = vocab_size
        self.cache = options.make_cache(model)
        self._in_slices = in_slices
        self._length = 0
        self._checkpoints: list[Checkpoint] = []  # by length, ascending
        self._pins: list[Checkpoint] = []  # likewise; not for rounds, but for other texts
        self._is_quantized = False

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """See `CachedSequence.feed`."""
        if num_logits == 0:
            self._forward(tokens)
            mx.eval([layer.state for layer in self.cache])
            release_buffers()
            return None
        parts = [self._forward(part) for part in self._options.passes(self.cache, self._length, tokens)]
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return logits[-num_logits:]

    def feed_lazy(self, token: mx.array) -> mx.array:
        """See `CachedSequence.feed_lazy`."""
        logits: mx.array = self._model(token[None], cache=self.cache)
        self._grow(1)
        return logits[0]

    def _forward(self, tokens: tuple[int, ...]) -> mx.array:
        """(len(tokens), V) logits, lazy."""
        # A drafter may be narrower than its target. What it has no embedding for it reads as its last id: its
        # guess will be poor there, where an index out of bounds would read somebody else's memory.
        known = [min(token, self._vocab_size - 1) for token in tokens]
        with evaluate_in_slices(self._in_slices):
            logits: mx.array = self._model(mx.array([known]), cache=self.cache)
        self._grow(len(tokens))
        return logits[0]

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        """See `CachedSequence.prepare`."""
        rewind_mode = self._options.rewind_mode(self.cache, self._length, num_tokens, settled)
        if rewind_mode is RewindMode.CHECKPOINT and (
            not self._checkpoints or self._checkpoints[-1].length < self._length
        ):
            self._checkpoints.append(self._checkpoint())
        self._forget_below(settled)
        return rewind_mode

    def rewind(self, length: int) -> int:
        """See `CachedSequence.rewind`."""
        if length > self._length:
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self._length}")
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._restore(length)
        self._drop_what_is_ahead()
        self.check(self._length)
        return self._length

    def check(self, length: int) -> None:
        """See `CachedSequence.check`."""
        for i, layer in enumerate(self.cache):
            for have in lengths(layer):
                if have != length:
                    raise RewindError(
                        f"layer {i} ({type(layer).__name__}) should hold {length} tokens, it holds {have}"
                    )

    @property
    def length(self) -> int:
        """Tokens that it has processed."""
        return self._length

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """What it holds, for a file; None where some cache is of a class of which nothing is known.

        Args:
            tokens: that it has processed.

        Raises: RewindError: it holds another number of tokens.
        """
        self.check(len(tokens))
        if not tokens or not all(can_take_state(layer) for layer in self.cache):
            return None
        return SequenceState(
            tokens, tuple(take_state(layer) for layer in self.cache), tuple(self._take_prefix_checkpoints())
        )

    def _take_prefix_checkpoints(self) -> Iterator[PrefixCheckpointState]:
        now = self._checkpoint()
        for length, checkpoint in sorted({c.length: c for c in (*self._checkpoints, *self._pins)}.items()):
            self._put_back(checkpoint)
            yield PrefixCheckpointState(length, tuple(take_prefix_checkpoint(layer) for layer in self.cache))
        self._put_back(now)

    def put_state(self, state: SequenceState) -> None:
        """Have an empty line hold what another one of the same model held.

        Raises: MisfitError, RewindError: the state is none of this model's; the line is empty still.
        """
        if any(
            len(layers) != len(self.cache)
            for layers in (
                state.layers,
                *(pin.layers for pin in state.prefix_checkpoints),
            )
        ):
            raise MisfitError(f"it has {len(state.layers)} layers where the model has {len(self.cache)}")
        bounds = [
            0,
            *(pin.length for pin in state.prefix_checkpoints),
            len(state.tokens) + 1,
        ]
        if any(length >= after for length, after in pairwise(bounds)):
            raise MisfitError(f"its pins are at {bounds[1:-1]}, and it has {len(state.tokens)} tokens")
        is_quantized = any(layer.kind == "QuantizedKVCache" for layer in state.layers)
        like = [*zip(*(self._grown_cache(n, quantized=is_quantized) for n in (1, 8)), strict=True)]
        empty = self.cache
        try:
            self.cache = [put_state(taken, *pair) for taken, pair in zip(state.layers, like, strict=True)]
            self.check(len(state.tokens))
            for pin in state.prefix_checkpoints:
                layers = zip(pin.layers, self.cache, like, strict=True)
                restores = [put_prefix_checkpoint(taken, pin.length, layer, *pair) for taken, layer, pair in layers]
                self._pins.append(Checkpoint(pin.length, restores))
        except (MisfitError, RewindError):
            self.cache, self._pins = empty, []
            raise
        self._length = len(state.tokens)
        self._is_quantized = is_quantized

    def _grown_cache(self, num_tokens: int, *, quantized: bool) -> list[Any]:
        """What the caches are like with some tokens in them; of shapes alone, since nothing of it is computed."""
        cache = self._options.make_cache(self._model)
        self._model(mx.zeros((1, num_tokens), mx.int32), cache=cache)
        if quantized:
            attrs.evolve(self._options, quantized_kv_start=0).quantize(cache, num_tokens)
        return cache

    def close(self) -> None:
        """See `CachedSequence.close`."""
        self.cache = []
        self._checkpoints = []
        self._pins = []

    @property
    def num_bytes(self) -> int:
        """See `CachedSequence.num_bytes`."""
        in_checkpoints = sum(checkpoint_bytes(layer) for layer in self.cache)
        num_checkpoints = len(self._checkpoints) + len(self._pins)
        return sum(int(layer.nbytes) for layer in self.cache) + num_checkpoints * in_checkpoints

    @property
    def needs_prefix_checkpoints(self) -> bool:
        """See `CachedSequence.needs_prefix_checkpoints`."""
        # A prefill is cut where a pin is set.
        if self.depends_on_passes:
            return False
        return not all(can_always_trim(layer) for layer in self.cache) and self._options.can_checkpoint(self.cache)

    @property
    def depends_on_passes(self) -> bool:
        """See `CachedSequence.depends_on_passes`."""
        # Caches are quantised at the end of a pass, and some read several tokens otherwise than one by one.
        return self._options.kv_bits is not None or not self._options.reads_alike(self.cache, sys.maxsize)

    def add_prefix_checkpoint(self) -> None:
        """See `CachedSequence.add_prefix_checkpoint`."""
        if not self._pins or self._pins[-1].length < self._length:
            self._pins.append(self._checkpoint())

    def reach(self, length: int, num_tokens: int) -> int:
        """See `CachedSequence.reach`."""
        # What is quantised was read otherwise from the moment on at which it was, and that is another one in
        # another text.
        if self._is_quantized or not self._options.reads_alike(self.cache, num_tokens):
            return 0
        if self._length <= length:
            return self._length
        if self._options.can_trim(self.cache, 0, length):
            return length
        return max((c.length for c in (*self._checkpoints, *self._pins) if c.length <= length), default=0)

    def resume(self, length: int) -> None:
        """See `CachedSequence.resume`."""
        if length < self._length:
            if self._options.can_trim(self.cache, 0, length):
                self._trim(length)
            else:
                self._put_back(next(c for c in (*self._checkpoints, *self._pins) if c.length == length))
        self._checkpoints.clear()
        self._drop_what_is_ahead()
        self.check(length)

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self._length, [snapshot(layer) for layer in self.cache])

    def _put_back(self, checkpoint: Checkpoint) -> None:
        for restore in checkpoint.layers:
            restore()
        self._length = checkpoint.length

    def _drop_what_is_ahead(self) -> None:
        self._checkpoints = [checkpoint for checkpoint in self._checkpoints if checkpoint.length <= self._length]
        self._pins = [pin for pin in self._pins if pin.length <= self._length]

    def _restore(self, length: int) -> None:
        """Go back to the last checkpoint at or below a length."""
        below = [checkpoint for checkpoint in self._checkpoints if checkpoint.length <= length]
        # Where there is none below, tokens were fed that could still be trimmed then: a cache that has lost
        # the ability since (a rotating one that filled) has it again in the state before.
        found = below[-1:] or self._checkpoints[:1]
        if found:
            self._put_back(found[0])
        if self._length > length:
            if not self._options.can_trim(self.cache, 0, length):
                raise RewindError(
                    f"asked to rewind to {length} tokens a cache that holds {self._length}, which cannot be trimmed "
                    f"and has checkpoints at {[checkpoint.length for checkpoint in self._checkpoints]}"
                )
            self._trim(length)

    def _trim(self, length: int) -> None:
        for layer in self.cache:
            trim(layer, self._length - length)
        self._length = length

    def _forget_below(self, settled: int) -> None:
        """Drop checkpoints that no rewind can need: all below the last that is at or below `settled`."""
        while len(self._checkpoints) > 1 and self._checkpoints[1].length <= settled:
            del self._checkpoints[0]

    def _grow(self, num_tokens: int) -> None:
        before, self._length = self._length, self._length + num_tokens
        if self._options.quantize(self.cache, self._length):
            self._is_quantized = True
            # They speak of the caches that were there before.
            self._checkpoints.clear()
            self._pins.clear()
        # Caches grow in steps of 256, and MLX would keep each outgrown buffer for later.
        if before // 256 != self._length // 256:
            release_buffers()


@attrs.frozen
class Checkpoint:
    """The state of a line's caches when they held `length` tokens."""

    length: int
    layers: list[Restore]
