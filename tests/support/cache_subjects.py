"""Models with every kind of cache, for tests of rewinding, saving and draft steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import mlx.core as mx
import mlx.nn as nn
from architectures import build
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ConcatenateKVCache
from models import Wrapped, gemma3_text, llama, mamba, prompt_of

from actors.mlx.cache_kinds import KINDS, CacheKind
from actors.mlx.cache_options import CacheOptions
from actors.mlx.row_caches import RowKVCache
from actors.mlx.sequence import MLXSequence

VOCAB_SIZE = 64
TEXT = prompt_of(120, vocab_size=VOCAB_SIZE)


WINDOW = 8  # of all sliding windows and bounded caches here


# Rounding in float32 moves the logits (of about 5) by less. A token too many or too few moves them by 0.1.
ATOL = 1e-4


class Concatenating(Wrapped):
    """A model whose caches are `ConcatenateKVCache`s."""

    def make_cache(self) -> list[Any]:
        return [ConcatenateKVCache() for _ in self.layers]


class JoinedCache:
    """A class that Outrider knows by `JoinedKind` alone: keys and values in one array, which each pass replaces."""

    def __init__(self) -> None:
        self.joined: Any = None  # (B, heads of keys and then of values, tokens, width of a head)
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        new = mx.concatenate([keys, values], axis=1)
        self.joined = new if self.joined is None else mx.concatenate([self.joined, new], axis=2)
        self.offset = self.joined.shape[2]
        return mx.split(self.joined, 2, axis=1)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return create_causal_mask(N, self.offset, window_size=window_size)

    def empty(self) -> bool:
        return self.joined is None

    @property
    def state(self) -> tuple[Any, int]:
        return self.joined, self.offset

    @property
    def nbytes(self) -> int:
        return 0 if self.joined is None else int(self.joined.nbytes)

    @classmethod
    def from_state(cls, state: tuple[Any, int]) -> JoinedCache:
        made = cls()
        made.joined, made.offset = state
        return made


class JoinedRows(RowKVCache):
    """Rows of texts of `JoinedCache`s."""

    def join(self, single: JoinedCache, length: int) -> None:
        if length > 0:
            keys, values = mx.split(single.joined, 2, axis=1)
            super().join(SimpleNamespace(keys=keys, values=values), length)
        single.joined = None

    def copy_to(self, row: int, length: int, single: JoinedCache) -> None:
        left = SimpleNamespace()
        super().copy_to(row, length, left)
        single.joined, single.offset = mx.concatenate([left.keys, left.values], axis=1), length


class JoinedKind(CacheKind):
    """All that a new class needs."""

    cache_class = JoinedCache
    always_trims = True
    kept = ("joined", "offset")

    def trim(self, layer: JoinedCache, num_tokens: int) -> None:
        layer.offset -= num_tokens
        layer.joined = layer.joined[:, :, : layer.offset]

    def check_state(self, state: Any, like: JoinedCache, longer: JoinedCache) -> None:
        num_rows = self._num_rows(state[:1], (like.joined,))
        self._require_length(type(state[1]) is int and state[1] == num_rows)

    def row_cache(self, layer: JoinedCache) -> JoinedRows:
        return JoinedRows()


KINDS[JoinedCache] = JoinedKind()


class Joining(Wrapped):
    """A model whose caches are `JoinedCache`s."""

    def make_cache(self) -> list[Any]:
        return [JoinedCache() for _ in self.layers]


@attrs.frozen
class Subject:
    """A model with caches of some kind, and its reference logits: one token of a text per pass, without rewinds."""

    model: nn.Module
    options: CacheOptions = attrs.Factory(CacheOptions)

    def open_sequence(self, rewind: Any) -> MLXSequence:
        options = attrs.evolve(self.options, rewind=rewind)
        return MLXSequence(self.model, options, vocab_size=VOCAB_SIZE)

    def rows(self, num_prefilled: int, texts: Sequence[tuple[int, ...]]) -> list[mx.array]:
        """The logits after each of some texts that have in common the first `num_prefilled` tokens, fed in one pass."""
        if not texts:
            return []
        whole: list[tuple[int, ...]] = []  # those that are no beginnings of others
        for text in sorted(texts, key=len, reverse=True):
            if all(other[: len(text)] != text for other in whole):
                whole.append(text)
        # All are read at once; what is appended to the shorter ones changes nothing of what was before.
        filled = mx.array([[*text, *whole[0][len(text) :]] for text in whole])
        cache = self.options.make_cache(self.model)
        if num_prefilled:
            self._pass(filled[:, :num_prefilled], cache)
        after = {i + 1: self._pass(filled[:, i : i + 1], cache) for i in range(num_prefilled, len(whole[0]))}
        mx.eval(list(after.values()))
        rows = (next(n for n, other in enumerate(whole) if other[: len(text)] == text) for text in texts)
        return [after[len(text)][row] for text, row in zip(texts, rows, strict=True)]

    def _pass(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)[:, -1]
        options = self.options
        maybe_quantize_kv_cache(cache, options.quantized_kv_start, options.kv_group_size, options.kv_bits)
        return logits


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "KVCache": lambda: Subject(llama()),
    "QuantizedKVCache": lambda: Subject(
        build("qwen3", head_dim=32), CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    ),
    "QuantizedKVCache in mid-text": lambda: Subject(
        build("qwen3", head_dim=32), CacheOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=12)
    ),
    "ConcatenateKVCache": lambda: Subject(Concatenating(llama())),
    "JoinedCache": lambda: Subject(Joining(llama())),
    "SlidingWindowCache": lambda: Subject(gemma3_text(window=WINDOW)),
    "RotatingKVCache that keeps its first": lambda: Subject(build("qwen3"), CacheOptions(max_kv_size=WINDOW)),
    "ChunkedKVCache": lambda: Subject(build("llama4")),
    "ArraysCache, mamba": lambda: Subject(mamba()),
    "ArraysCache, lfm2": lambda: Subject(build("lfm2")),
    "ArraysCache, qwen3_next": lambda: Subject(build("qwen3_next")),
    "ArraysCache and SlidingWindowCache": lambda: Subject(build("recurrent_gemma")),
    "CacheList of KVCache": lambda: Subject(build("deepseek_v32")),
    "CacheList of ArraysCache": lambda: Subject(build("falcon_h1")),
}


@functools.cache
def subject(name: str) -> Subject:
    return SUBJECTS[name]()
