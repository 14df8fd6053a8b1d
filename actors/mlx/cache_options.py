"""Options of an mlx-lm model's caches: how they are made, rewound and quantised, and how a feed is divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import attrs
import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from actors.mlx.cache_kinds import CacheKind, kind_of, kinds_of
from actors.mlx.row_caches import MAX_WIDTH, STEP
from actors.model import RewindMode
from protocol.cache_size import CacheSize

Rewind = Literal["auto", "trim", "checkpoint", "none"]

_NUM_MEASURED = 16  # tokens with which shapes are measured: more than a convolution keeps


@attrs.frozen
class CacheOptions:
    """How a model's caches are made, rewound and quantised."""

    # "auto" takes the best mode that all layers have now: trim, checkpoint, none (N=1). The others allow themselves or
    # none.
    rewind: Rewind = "auto"
    # Most tokens that a cache keeps, for models that do not make their own caches; None for no bound. As in mlx-lm, the
    # first four tokens are kept for good.
    max_kv_size: int | None = None
    # Bits to which key-value caches are quantised, in groups of `kv_group_size` elements; None for no quantisation.
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000  # number of cached tokens from which a cache is quantised
    one_by_one: bool = False  # whether the model must be fed one token at a time; see `actors.mlx.model`

    def make_cache(self, model: Module) -> list[Any]:
        """Empty caches for one text: the model's own, but sliding windows get caches that can always be trimmed."""
        made = make_prompt_cache(model, max_kv_size=self.max_kv_size)
        return [kind_of(layer).working(layer) for layer in made]

    def grown_cache(self, model: Module, num_tokens: int, *, quantized: bool) -> list[Any]:
        """Caches that hold `num_tokens` tokens, to compare shapes with; lazy, and never computed."""
        cache = self.make_cache(model)
        model(mx.zeros((1, num_tokens), mx.int32), cache=cache)
        if quantized:
            attrs.evolve(self, quantized_kv_start=0).quantize(cache, num_tokens)
        return cache

    def size(self, model: Module, *, are_rows: bool) -> CacheSize:
        """The sizes of a text's caches, by shapes that are never computed. `are_rows`: whether texts share passes."""
        windows: Counter[int] = Counter()
        slot_bytes = fixed_bytes = 0
        for kind, layer, longer in self._measured(model, quantized=False):
            each = kind.slot_bytes(layer, longer, _NUM_MEASURED)
            if each == 0:
                fixed_bytes += int(longer.nbytes)
            elif (most_slots := kind.most_slots(layer)) is None:
                slot_bytes += each
            else:
                windows[most_slots] += each
        size = CacheSize(slot_bytes, tuple(windows.items()), fixed_bytes, STEP + MAX_WIDTH, are_rows)
        if self.kv_bits is None:
            return size
        each = sum(
            kind.slot_bytes(layer, longer, _NUM_MEASURED)
            for kind, layer, longer in self._measured(model, quantized=True)
            if kind.most_slots(layer) is None  # the others cannot be quantised
        )
        return attrs.evolve(size, slot_bytes=each, dense_slots=self._quantized_from, dense_slot_bytes=slot_bytes)

    def _measured(self, model: Module, *, quantized: bool) -> Iterator[tuple[CacheKind, Any, Any]]:
        """Each cache of a short text with its kind, and that of one with `_NUM_MEASURED` more tokens."""
        short, longer = (self.grown_cache(model, n * _NUM_MEASURED, quantized=quantized) for n in (1, 2))
        for (kind, layer), (_, longer_layer) in zip(kinds_of(short), kinds_of(longer), strict=True):
            yield kind, layer, longer_layer

    def always_trims(self, cache: list[Any]) -> bool:
        """Whether any feed is one pass, and can be undone by a trim, however long the text is."""
        may_trim = self.rewind in ("auto", "trim") and self.kv_bits is None and not self.one_by_one
        return may_trim and all(kind.always_trims for kind, _ in kinds_of(cache))

    def can_trim(self, cache: list[Any], num_tokens: int, back_to: int | None = None) -> bool:
        """Whether every layer could take `num_tokens` more and then drop its tail; see `CacheKind.can_trim_after`."""
        return self.rewind in ("auto", "trim") and all(
            kind.can_trim_after(layer, num_tokens, back_to) for kind, layer in kinds_of(cache)
        )

    def can_checkpoint(self, cache: list[Any]) -> bool:
        """Whether the state of every layer can be kept and restored."""
        return self.rewind in ("auto", "checkpoint") and all(kind.can_keep_state for kind, _ in kinds_of(cache))

    def reads_alike(self, cache: list[Any], num_tokens: int) -> bool:
        """Whether a text of `num_tokens` tokens is read the same way, however it is divided into passes."""
        return not self.one_by_one and all(kind.reads_alike(layer, num_tokens) for kind, layer in kinds_of(cache))

    def rewind_mode(self, cache: list[Any], length: int, num_tokens: int, back_to: int | None = None) -> RewindMode:
        """How a feed after `length` tokens could be undone; see `CacheKind.can_trim_after`."""
        # Quantisation cannot be undone. Only committed tokens may cause it: at the same length as in plain decoding.
        if self.kv_bits is not None and length < self._quantized_from <= length + num_tokens:
            return RewindMode.SINGLE
        if self._goes_one_by_one(cache, length, num_tokens):
            return RewindMode.SINGLE
        if self.can_trim(cache, num_tokens, back_to):
            return RewindMode.TRIM
        return RewindMode.CHECKPOINT if self.can_checkpoint(cache) else RewindMode.SINGLE

    def passes(self, cache: list[Any], length: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Divide a feed after `length` tokens into passes whose logits equal those of plain decoding."""
        if self._goes_one_by_one(cache, length, len(tokens)):
            return [(token,) for token in tokens]
        if self.kv_bits is not None and length < self._quantized_from < length + len(tokens):
            # Caches are quantised at the end of a pass, and the tokens after that must read quantised keys.
            cut = self._quantized_from - length
            return [tokens[:cut], tokens[cut:]]
        return [tokens]

    def quantized_at(self, num_read: int, pass_tokens: int) -> int:
        """The length at which a text's caches are quantised if `num_read` tokens are read in such passes."""
        start = self._quantized_from
        end_of_pass = -(-start // pass_tokens) * pass_tokens
        return min(end_of_pass, num_read) if num_read >= start else start

    @property
    def _quantized_from(self) -> int:
        """At least 1: empty caches are not quantised, so the first pass is not either."""
        return max(1, self.quantized_kv_start)

    def _goes_one_by_one(self, cache: list[Any], length: int, num_tokens: int) -> bool:
        return num_tokens > 1 and not self.reads_alike(cache, length + num_tokens)

    def quantize(self, cache: list[Any], length: int) -> bool:
        """After a feed to `length` tokens, quantise those caches in the list that are due. Returns: whether any was."""
        if self.kv_bits is None or length < self.quantized_kv_start:
            return False
        before = list(cache)
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        return any(new is not old for new, old in zip(cache, before, strict=True))
