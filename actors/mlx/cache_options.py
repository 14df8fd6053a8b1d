"""How the caches of an mlx-lm model are made, which ways they have to be put right, and how a feed is divided."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from mlx.nn.layers.base import Module
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from actors.mlx.cache_rewind import can_checkpoint, can_read_at_once, can_trim_after, reads_alike
from actors.model import RewindMode

Rewind = Literal["auto", "trim", "checkpoint", "none"]


@attrs.frozen
class CacheOptions:
    """How a model's caches are made, and how they may be put right.

    Attributes:
        rewind: "auto" takes the first of trim, checkpoint and N=1 that all layers have at the moment;
            "trim" and "checkpoint" insist on one of them where there is one; "none" never rewinds.
        max_kv_size: most tokens that a cache keeps, for models that do not make caches of their own;
            None for no bound. As in mlx-lm, the first four are kept for good.
        kv_bits: quantise key-value caches to so many bits, or None.
        kv_group_size: quantisation group.
        quantized_kv_start: quantise once a cache holds so many tokens.
        one_by_one: whether a model's passes over several tokens are not to be trusted; see `_ONE_BY_ONE`.
    """

    rewind: Rewind = "auto"
    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    one_by_one: bool = False

    def make_cache(self, model: Module) -> list[Any]:
        """Empty caches for one text."""
        caches: list[Any] = make_prompt_cache(model, max_kv_size=self.max_kv_size)
        return caches

    def can_trim(self, cache: list[Any], num_tokens: int, back_to: int | None = None) -> bool:
        """Whether every layer could take so many tokens more and drop its tail; see `can_trim_after`."""
        return self.rewind in ("auto", "trim") and all(can_trim_after(layer, num_tokens, back_to) for layer in cache)

    def can_checkpoint(self, cache: list[Any]) -> bool:
        """Whether every layer's state can be kept and restored."""
        return self.rewind in ("auto", "checkpoint") and all(can_checkpoint(layer) for layer in cache)

    def reads_alike(self, cache: list[Any], num_tokens: int) -> bool:
        """Whether a text of so many tokens is read the same way, however it is divided into passes."""
        return not self.one_by_one and all(reads_alike(layer, num_tokens) for layer in cache)

    def rewind_mode(self, cache: list[Any], length: int, num_tokens: int, back_to: int | None = None) -> RewindMode:
        """How a feed of so many tokens, from a length, could be undone; see `can_trim_after`."""
        # Quantising cannot be undone. Only committed tokens may bring it about, and then at the same place as
        # in plain decoding.
        if self.kv_bits is not None and length < self._quantized_from <= length + num_tokens:
            return RewindMode.SINGLE
        if num_tokens > 1 and self._goes_one_by_one(cache, num_tokens):
            return RewindMode.SINGLE
        if self.can_trim(cache, num_tokens, back_to):
            return RewindMode.TRIM
        return RewindMode.CHECKPOINT if self.can_checkpoint(cache) else RewindMode.SINGLE

    def passes(self, cache: list[Any], length: int, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
        """How to divide a feed, from a length, into passes, so that each gives what plain decoding would give."""
        if self._goes_one_by_one(cache, len(tokens)):
            return [(token,) for token in tokens]
        if self.kv_bits is not None and length < self._quantized_from < length + len(tokens):
            # The rest reads quantised keys.
            cut = self._quantized_from - length
            return [tokens[:cut], tokens[cut:]]
        return [tokens]

    @property
    def _quantized_from(self) -> int:
        """The least length at which caches are quantised: an empty one is not, and its first pass reads as it is."""
        return max(1, self.quantized_kv_start)

    def _goes_one_by_one(self, cache: list[Any], num_tokens: int) -> bool:
        """Whether so many tokens more need a pass each to be read as plain decoding reads them."""
        return self.one_by_one or not all(can_read_at_once(layer, num_tokens) for layer in cache)

    def quantize(self, cache: list[Any], length: int) -> bool:
        """Quantise what is due after a feed; returns whether something was."""
        if self.kv_bits is None or length < self.quantized_kv_start:
            return False
        before = list(cache)
        maybe_quantize_kv_cache(cache, self.quantized_kv_start, self.kv_group_size, self.kv_bits)
        return any(new is not old for new, old in zip(cache, before, strict=True))
