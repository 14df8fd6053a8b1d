"""What mlx-lm's caches can undo, layer by layer: the other half of the only place that knows their classes.

There are two ways back: *trim* drops the tail, to any length; a *checkpoint* keeps the state from before a feed,
and restores it.

What a class says of itself is not believed. `is_trimmable` speaks of the moment, so a rotating cache that
fills in mid-round cannot go back; `ConcatenateKVCache.trim` forgets the number of its tokens and keeps the
tokens. So both ways are written down here, by class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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

Restore = Callable[[], None]


def can_trim_after(layer: Any, num_tokens: int, back_to: int | None = None) -> bool:
    """Whether a layer's cache could take `num_tokens` more now, and then drop its tail.

    Args:
        layer: the cache.
        num_tokens: that would be fed, >= 0.
        back_to: the shortest length to which it should be possible to go back; None for the present one.
    """
    match layer:
        case CacheList():
            return all(can_trim_after(part, num_tokens, back_to) for part in layer.caches)
        case RotatingKVCache() if type(layer) is RotatingKVCache:
            return bool(layer.offset + num_tokens < layer.max_size)
        case ChunkedKVCache() if type(layer) is ChunkedKVCache:
            # A token attends to its chunk, from the chunk's beginning on, and each feed first drops what lies
            # more than a chunk behind it: after a few feeds over a chunk's end, the way back leads to a token
            # whose chunk is no longer whole.
            first_held = max(layer.start_position, layer.offset - layer.chunk_size if num_tokens else 0)
            length = layer.offset if back_to is None else back_to
            return bool(length // layer.chunk_size * layer.chunk_size >= first_held)
        case _:
            return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def can_read_at_once(layer: Any, num_tokens: int) -> bool:
    """Whether one pass over so many tokens more reads what a pass for each would read.

    Not where a rotating cache is full and keeps its first tokens for good: its mask over several tokens is
    that of a plain window, which hides the kept ones from all tokens but the first.
    """
    if isinstance(layer, CacheList):
        return all(can_read_at_once(part, num_tokens) for part in layer.caches)
    if isinstance(layer, RotatingKVCache) and layer.keep > 0:
        return bool(num_tokens <= 1 or layer.offset + num_tokens <= layer.max_size)
    return True


def can_always_trim(layer: Any) -> bool:
    """Whether a layer's cache can drop its tail to any length, however much it is fed."""
    if type(layer) is CacheList:
        return all(can_always_trim(part) for part in layer.caches)
    return type(layer) in (KVCache, QuantizedKVCache, ConcatenateKVCache)


def reads_alike(layer: Any, num_tokens: int) -> bool:
    """Whether a text of so many tokens is read the same way, however it is divided into passes.

    Not beyond the window of a rotating cache that keeps its first tokens: see `can_read_at_once`.
    """
    if isinstance(layer, CacheList):
        return all(reads_alike(part, num_tokens) for part in layer.caches)
    return not isinstance(layer, RotatingKVCache) or layer.keep == 0 or num_tokens <= layer.max_size


def can_checkpoint(layer: Any) -> bool:
    """Whether a layer's state can be kept and restored."""
    if type(layer) is CacheList:
        return all(can_checkpoint(part) for part in layer.caches)
    return type(layer) in _SNAPSHOTS


def trim(layer: Any, num_tokens: int) -> None:
    """Drop a layer's last `num_tokens`; `can_trim_after` must have said so before they were fed."""
    if type(layer) is CacheList:
        for part in layer.caches:
            trim(part, num_tokens)
    elif type(layer) is ConcatenateKVCache:
        layer.offset -= num_tokens
        layer.keys, layer.values = (state[..., : layer.offset, :] for state in layer.state)
    else:
        layer.trim(num_tokens)


def snapshot(layer: Any) -> Restore:
    """Keep a layer's state. Returns what puts it back, as often as it is called.

    Kept by reference where that is safe. It is not where a cache assigns into its array, since the assignment
    shows through every name of that array; a view does not change with it, at the price of a copy of the
    buffer when it is next written.
    """
    if type(layer) is CacheList:
        parts = [snapshot(part) for part in layer.caches]

        def restore() -> None:
            for part in parts:
                part()

        return restore
    return _SNAPSHOTS[type(layer)](layer)


def lengths(layer: Any) -> Iterator[int]:
    """The numbers of tokens that a layer's cache says it has processed; none where it keeps no count."""
    if isinstance(layer, CacheList):
        for part in layer.caches:
            yield from lengths(part)
    elif isinstance(offset := getattr(layer, "offset", None), int):
        yield offset


# --- snapshots, by class --------------------------------------------------------------------------


def _by_offset(layer: Any) -> Restore:
    """Rows beyond the offset are never read, so the offset is all there is to keep."""
    offset = layer.offset

    def restore() -> None:
        layer.offset = offset

    return restore


def _by_reference(*names: str) -> Callable[[Any], Restore]:
    """For state that is replaced when it changes, never written into."""

    def keep(layer: Any) -> Restore:
        state = {name: getattr(layer, name) for name in names}

        def restore() -> None:
            for name, value in state.items():
                setattr(layer, name, value)

        return restore

    return keep


def _by_view(*names: str) -> Callable[[Any], Restore]:
    """For arrays that are written into, and numbers."""

    def keep(layer: Any) -> Restore:
        state = {name: _view(getattr(layer, name)) for name in names}

        def restore() -> None:
            for name, value in state.items():
                # A view of the view: what is written after a first restore must not show in a second.
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
    ChunkedKVCache: _by_view("keys", "values", "offset", "start_position"),
    ArraysCache: _arrays,
}


# --- for people -----------------------------------------------------------------------------------


def kind(layer: Any) -> str:
    """What a layer's cache is, such as "RotatingKVCache(512)" or "CacheList(KVCache, KVCache)"."""
    if isinstance(layer, CacheList):
        return f"CacheList({', '.join(kind(part) for part in layer.caches)})"
    if isinstance(layer, RotatingKVCache):
        return f"RotatingKVCache({layer.max_size})"
    return type(layer).__name__


def window(layer: Any) -> int | None:
    """Tokens after which a layer's cache begins to forget, or None where it never does."""
    if isinstance(layer, CacheList):
        return min((size for part in layer.caches if (size := window(part)) is not None), default=None)
    return layer.max_size if isinstance(layer, RotatingKVCache) else None


def checkpoint_bytes(layer: Any) -> int:
    """What a checkpoint of a layer keeps in memory beside the cache itself, once that has moved on."""
    if isinstance(layer, CacheList):
        return sum(checkpoint_bytes(part) for part in layer.caches)
    if type(layer) in (KVCache, QuantizedKVCache):
        return 0
    return int(layer.nbytes)
