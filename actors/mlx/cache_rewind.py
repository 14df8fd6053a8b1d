"""Rewinding of caches: what the cache of one layer can undo, by class.

There are two ways to rewind. A *trim* drops the tail, to any length. A *checkpoint* keeps the state from before a feed,
and restores it.

What one of mlx-lm's classes says of itself is not reliable. `is_trimmable` is about the present moment, so a rotating
cache that fills in the middle of a round cannot be trimmed back. `ConcatenateKVCache.trim` reduces its count of tokens,
and keeps the tokens. So both ways are written down here, by class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from actors.mlx.sliding_window import SlidingWindowCache

Restore = Callable[[], None]


@attrs.frozen
class Checkpoint:
    """The state of a sequence's caches when they held `length` tokens.

    Attributes:
        length: number of tokens.
        restores: one function for each cache, which restores its state.
    """

    length: int
    restores: list[Restore]


def can_trim_after(layer: Any, num_tokens: int, back_to: int | None = None) -> bool:
    """Whether a layer's cache could take `num_tokens` more now, and then drop its tail.

    Args:
        layer: the cache.
        num_tokens: tokens that would be fed, >= 0.
        back_to: the shortest length to which the cache must be able to go back; None for the present length.
    """
    match layer:
        case CacheList():
            return all(can_trim_after(inner, num_tokens, back_to) for inner in layer.caches)
        case SlidingWindowCache() if type(layer) is SlidingWindowCache:
            return layer.can_trim_after(num_tokens, layer.offset if back_to is None else back_to)
        case RotatingKVCache() if type(layer) is RotatingKVCache:
            return bool(layer.offset + num_tokens < layer.max_size)
        case ChunkedKVCache() if type(layer) is ChunkedKVCache:
            # A token attends to its chunk from the chunk's beginning on. Each feed first drops the tokens that lie
            # more than a chunk behind it. So after a few feeds across the end of a chunk, the token to which the cache
            # goes back may lack a part of its chunk.
            first_cached = max(layer.start_position, layer.offset - layer.chunk_size if num_tokens else 0)
            length = layer.offset if back_to is None else back_to
            return bool(length // layer.chunk_size * layer.chunk_size >= first_cached)
        case _:
            return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def can_read_at_once(layer: Any, num_tokens: int) -> bool:
    """Whether one pass over `num_tokens` more tokens reads the same as a pass for each of them.

    Not if a rotating cache is full and keeps its first tokens for good. Its mask over several tokens is that of a plain
    window, which hides the kept tokens from all but the first of them.
    """
    if isinstance(layer, CacheList):
        return all(can_read_at_once(inner, num_tokens) for inner in layer.caches)
    if isinstance(layer, RotatingKVCache) and layer.keep > 0:
        return bool(num_tokens <= 1 or layer.offset + num_tokens <= layer.max_size)
    return True


def can_always_trim(layer: Any) -> bool:
    """Whether a layer's cache can drop its tail to any length, however much it is fed."""
    if type(layer) is CacheList:
        return all(can_always_trim(inner) for inner in layer.caches)
    return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def reads_alike(layer: Any, num_tokens: int) -> bool:
    """Whether `num_tokens` tokens are read the same way, however the text is divided into passes.

    Not beyond the window of a rotating cache that keeps its first tokens: see `can_read_at_once`.
    """
    if isinstance(layer, CacheList):
        return all(reads_alike(inner, num_tokens) for inner in layer.caches)
    return not isinstance(layer, RotatingKVCache) or layer.keep == 0 or num_tokens <= layer.max_size


def can_checkpoint(layer: Any) -> bool:
    """Whether a layer's state can be kept and restored."""
    if type(layer) is CacheList:
        return all(can_checkpoint(inner) for inner in layer.caches)
    return type(layer) in _SNAPSHOTS


def trim(layer: Any, num_tokens: int) -> None:
    """Drop a layer's last `num_tokens` tokens. `can_trim_after` must have been true before they were fed."""
    if type(layer) is CacheList:
        for inner in layer.caches:
            trim(inner, num_tokens)
    elif type(layer) is ConcatenateKVCache:
        layer.offset -= num_tokens
        layer.keys, layer.values = (state[..., : layer.offset, :] for state in layer.state)
    else:
        layer.trim(num_tokens)


def snapshot(layer: Any) -> Restore:
    """Keep a layer's state. Returns a function that restores it, as often as it is called.

    Arrays are kept by reference where that is safe. It is not where a cache assigns into its array, since every
    reference to the array sees the assignment. A view does not change with the array; its price is a copy of the buffer
    when the array is next written.
    """
    if type(layer) is CacheList:
        restores = [snapshot(inner) for inner in layer.caches]

        def restore_all() -> None:
            for restore in restores:
                restore()

        return restore_all
    return _SNAPSHOTS[type(layer)](layer)


def lengths(layer: Any) -> Iterator[int]:
    """The numbers of tokens that a layer's cache, or each cache in it, has processed; none if it keeps no count."""
    if isinstance(layer, CacheList):
        for inner in layer.caches:
            yield from lengths(inner)
    elif isinstance(offset := getattr(layer, "offset", None), int):
        yield offset


# --- snapshots, by class --------------------------------------------------------------------------


def _by_offset(layer: Any) -> Restore:
    """For arrays whose rows beyond the offset are never read, so that only the offset must be kept."""
    offset = layer.offset

    def restore() -> None:
        layer.offset = offset

    return restore


def _by_reference(*names: str) -> Callable[[Any], Restore]:
    """For attributes that are replaced when they change, or written into only where that is not read again."""

    def keep(layer: Any) -> Restore:
        state = {name: getattr(layer, name) for name in names}

        def restore() -> None:
            for name, value in state.items():
                setattr(layer, name, value)

        return restore

    return keep


def _by_view(*names: str) -> Callable[[Any], Restore]:
    """For arrays that are written into, and for numbers."""

    def keep(layer: Any) -> Restore:
        state = {name: _view(getattr(layer, name)) for name in names}

        def restore() -> None:
            for name, value in state.items():
                # A view of the view, so that writes after a first restore do not show in a second.
                setattr(layer, name, _view(value))

        return restore

    return keep


def _view(value: Any) -> Any:
    return value[...] if isinstance(value, mx.array) else value


def _arrays(layer: ArraysCache) -> Restore:
    cache, rest = list(layer.cache), (layer.left_padding, layer.lengths)

    def restore() -> None:
        layer.cache = list(cache)
        layer.left_padding, layer.lengths = rest

    return restore


_SNAPSHOTS: dict[type, Callable[[Any], Restore]] = {
    KVCache: _by_offset,
    QuantizedKVCache: _by_offset,
    ConcatenateKVCache: _by_reference("keys", "values", "offset"),
    RotatingKVCache: _by_view("keys", "values", "offset", "_idx"),
    # What it writes is behind the tokens that a reference is kept for, unless a trim has given those up.
    SlidingWindowCache: _by_reference("keys", "values", "offset", "_idx"),
    ChunkedKVCache: _by_view("keys", "values", "offset", "start_position"),
    ArraysCache: _arrays,
}


# --- for reports ----------------------------------------------------------------------------------


def kind(layer: Any) -> str:
    """The kind of a layer's cache, such as "SlidingWindowCache(512)" or "CacheList(KVCache, KVCache)"."""
    if isinstance(layer, CacheList):
        return f"CacheList({', '.join(kind(inner) for inner in layer.caches)})"
    if isinstance(layer, RotatingKVCache):
        return f"{type(layer).__name__}({layer.max_size})"
    return type(layer).__name__


def window(layer: Any) -> int | None:
    """Tokens after which a layer's cache begins to forget; None if it never does."""
    if isinstance(layer, CacheList):
        return min((size for inner in layer.caches if (size := window(inner)) is not None), default=None)
    return layer.max_size if isinstance(layer, RotatingKVCache) else None


def checkpoint_bytes(layer: Any) -> int:
    """Bytes that a checkpoint of a layer keeps in memory in addition to the cache, once the cache has changed."""
    if isinstance(layer, CacheList):
        return sum(checkpoint_bytes(inner) for inner in layer.caches)
    if type(layer) in (KVCache, QuantizedKVCache):
        return 0
    return int(layer.nbytes)
