"""The state of a layer's cache, for files: how it is taken out, checked, and put into another cache.

Each of mlx-lm's cache classes has `state` and `from_state`, and those are used here. But a file never chooses the
class: a state goes into a cache of the class that the model makes for itself, and only if it fits. So every number and
shape in a file is compared with such a cache before a model works on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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

from actors.mlx.cache_rewind import Restore, lengths
from actors.mlx.sliding_window import MAX_TRIM, SlidingWindowCache

State = Any
"""The `state` of a cache: arrays, whole numbers and None, in nested tuples."""


@attrs.frozen
class LayerState:
    """The state of one layer's cache.

    Attributes:
        kind: the name of mlx-lm's class that has such a state.
        state: see `State`; None for a `CacheList`.
        inner: the states of the caches in a `CacheList`; empty for every other class.
    """

    kind: str
    state: State = None
    inner: tuple[LayerState, ...] = ()

    @property
    def arrays(self) -> State:
        """All of the state, as `mx.eval` takes it."""
        return [inner.arrays for inner in self.inner] if self.inner else self.state


class MisfitError(Exception):
    """A state does not fit the cache that it is meant for."""


def can_take_state(layer: Any) -> bool:
    """Whether a layer's state can be taken, and put into another cache."""
    if type(layer) is CacheList:
        return all(can_take_state(inner) for inner in layer.caches)
    return type(layer) in _KINDS


def take_state(layer: Any) -> LayerState:
    """The state of a layer's cache, without the unused rows of its buffers. Arrays may be lazy.

    Later writes into the cache do not change the state.
    """
    if type(layer) is CacheList:
        return LayerState("CacheList", inner=tuple(take_state(inner) for inner in layer.caches))
    return LayerState(_name(type(layer)), _as_view(_KINDS[type(layer)].take(layer)))


def put_state(taken: LayerState, like: Any, longer: Any) -> Any:
    """A new cache with a given state.

    Args:
        taken: the state; may be anything that a file has.
        like: a cache of the model's layer that holds one token. It gives the class, bounds, shapes and number formats.
        longer: the same with some more tokens. Where its shapes differ from those of `like`, they depend on the length.

    Raises: MisfitError: this is not the state of such a cache.
    """
    if type(like) is CacheList:
        _check_inner(taken, like)
        pairs = zip(like.caches, longer.caches, strict=True)
        return CacheList(*(put_state(inner, *pair) for inner, pair in zip(taken.inner, pairs, strict=True)))
    if type(like) not in _KINDS:
        raise MisfitError(f"the model has a {type(like).__name__}, a cache class that is not known")
    if taken.kind != _name(type(like)):
        raise MisfitError(f"it has a {taken.kind[:40]} where the model has a {_name(type(like))}")
    kind = _KINDS[type(like)]
    _require(isinstance(taken.state, tuple) and len(taken.state) == len(like.state), "a state of another form", like)
    kind.check(taken.state, like, longer)
    return kind.make(taken.state, type(like))


def take_prefix_checkpoint(layer: Any) -> LayerState:
    """The state with which a layer can later be rewound to its present length.

    For a class whose rows stay as they were written, that is only their number.
    """
    if type(layer) is CacheList:
        return LayerState("CacheList", inner=tuple(take_prefix_checkpoint(inner) for inner in layer.caches))
    if type(layer) is KVCache:
        return LayerState("KVCache", (None, None, layer.offset))
    if type(layer) is SlidingWindowCache:
        return LayerState(_name(type(layer)), _take_window(layer, num_past=0))
    return take_state(layer)


def put_prefix_checkpoint(taken: LayerState, length: int, layer: Any, like: Any, longer: Any) -> Restore:
    """A function that rewinds a layer to a prefix checkpoint, as often as it is called.

    Args:
        taken: the result of `take_prefix_checkpoint`; may be anything that a file has.
        length: tokens that the layer held then.
        layer: the layer's cache, which holds those tokens and perhaps more.
        like, longer: as for `put_state`.

    Raises: MisfitError: such a layer cannot have had this state at that length.
    """
    if type(layer) is CacheList:
        _check_inner(taken, like)
        caches = zip(layer.caches, like.caches, longer.caches, strict=True)
        restores = [
            put_prefix_checkpoint(inner, length, *three) for inner, three in zip(taken.inner, caches, strict=True)
        ]

        def restore_all() -> None:
            for restore in restores:
                restore()

        return restore_all
    if type(layer) is KVCache:
        fits = taken.kind == "KVCache" and isinstance(taken.state, tuple) and len(taken.state) == 3
        fits = fits and _is_number(taken.state[2], length, min(length, layer.offset))
        _require(fits, "another length in a prefix checkpoint", like)

        def cut() -> None:
            layer.offset = length

        return cut
    put_lengths = lengths(put_state(taken, like, longer))
    _require(all(put_length == length for put_length in put_lengths), "another length in a prefix checkpoint", like)
    return partial(fill, layer, taken)


def fill(layer: Any, taken: LayerState) -> None:
    """Give a layer's cache a state that was taken of a cache of the same layer, and was not read from a file.

    The cache has new views each time, so that writes after a first call do not show in a second.
    """
    if type(layer) is CacheList:
        for inner, taken_inner in zip(layer.caches, taken.inner, strict=True):
            fill(inner, taken_inner)
        return
    vars(layer).update(vars(_KINDS[type(layer)].make(_as_view(taken.state), type(layer))))


# --- by class -------------------------------------------------------------------------------------


def _check_inner(taken: LayerState, like: CacheList) -> None:
    _require(taken.kind == "CacheList" and len(taken.inner) == len(like.caches), "other caches in it", like)


def _name(kind: type) -> str:
    """The name of a cache class in a file. A sliding window has the state, and the name, of a `RotatingKVCache`."""
    return (RotatingKVCache if kind is SlidingWindowCache else kind).__name__


def _require(fits: bool, misfit: str, like: Any) -> None:
    """Raise an error with a description of the misfit, unless the state fits."""
    if not fits:
        raise MisfitError(f"its {_name(type(like))} has {misfit}")


def _is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _have_same_form(array: Any, other: mx.array, growing: Sequence[int]) -> bool:
    """Whether two arrays differ only in their elements and in their lengths along the axes `growing`."""
    if not isinstance(array, mx.array) or array.ndim != other.ndim:
        return False
    if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(other.dtype, mx.floating):
        return False
    return all(a == b or i in growing for i, (a, b) in enumerate(zip(array.shape, other.shape, strict=True)))


def _num_rows(buffers: Sequence[Any], like_buffers: Sequence[mx.array], like: Any) -> int:
    """The number of rows of keys and values.

    Raises: MisfitError: the numbers differ, or the buffers have another form than those of the cache `like`.
    """
    for buffer, like_buffer in zip(buffers, like_buffers, strict=True):
        _require(_have_same_form(buffer, like_buffer, [2]), "arrays of another shape", like)
    num_rows = {int(buffer.shape[2]) for buffer in buffers}
    _require(len(num_rows) == 1, "keys and values of different lengths", like)
    return num_rows.pop()


def _cut(state: State, num_rows: int) -> State:
    """The state with the first `num_rows` rows of keys and values: those that were written."""
    if isinstance(state, (tuple, list)):
        return tuple(_cut(inner, num_rows) for inner in state)
    return state[..., :num_rows, :] if isinstance(state, mx.array) else state


def _as_view(state: State) -> State:
    """The state with views of its arrays. An assignment into an array shows in its references, but not in its views."""
    if isinstance(state, (tuple, list)):
        return tuple(_as_view(inner) for inner in state)
    return state[...] if isinstance(state, mx.array) else state


def _take_up_to_offset(layer: Any) -> State:
    return _cut(layer.state, layer.offset)


def _take_chunk(layer: ChunkedKVCache) -> State:
    return _cut(layer.state, layer.offset - layer.start_position)


def _take_rotating(layer: RotatingKVCache) -> State:
    # Once the cache has wrapped round, every row belongs to the window.
    return _cut(layer.state, layer.offset) if layer._idx == layer.offset else layer.state


def _take_window(layer: SlidingWindowCache, num_past: int = MAX_TRIM) -> State:
    """The state with the tokens of the window and `num_past` before them, by which it can be trimmed."""
    keys, values, offset, keep, max_size, num_held = layer.state
    num_taken = min(num_held, max_size + num_past)
    first = num_held - num_taken
    return keys[..., first:, :], values[..., first:, :], offset, keep, max_size, num_taken


def _take_arrays(layer: ArraysCache) -> State:
    return layer.state


def _check_kv(state: State, like: Any, _: Any) -> None:
    keys, values, offset = state
    num_rows = _num_rows((keys, values), (like.keys, like.values), like)
    _require(_is_number(offset, 0, num_rows), "a length that its arrays do not have", like)


def _check_concatenated(state: State, like: Any, _: Any) -> None:
    _num_rows(state, (like.keys, like.values), like)


def _check_quantized(state: State, like: Any, _: Any) -> None:
    keys, values, offset, group_size, bits = state
    _require(
        all(isinstance(arrays, tuple) and len(arrays) == 3 for arrays in (keys, values)), "arrays of another form", like
    )
    num_rows = _num_rows((*keys, *values), (*like.keys, *like.values), like)
    _require(_is_number(offset, 0, num_rows), "a length that its arrays do not have", like)
    _require((group_size, bits) == (like.group_size, like.bits), "another quantisation", like)


def _check_rotating(state: State, like: Any, _: Any) -> None:
    keys, values, offset, keep, max_size, index = state
    _require((keep, max_size) == (like.keep, like.max_size), f"a window other than {like.max_size}", like)
    num_rows = _num_rows((keys, values), (like.keys, like.values), like)
    if num_rows == offset:
        fits = _is_number(index, num_rows, num_rows) or (num_rows == max_size and _is_number(index, keep, max_size))
    else:
        # The cache has wrapped round: the next row to write is any after the first `keep`. After a feed of several
        # tokens there are more rows than the window has, in order.
        has_wrapped = max_size <= num_rows and _is_number(offset, num_rows, 2**31 - 1)
        fits = has_wrapped and _is_number(index, keep if num_rows == max_size else num_rows, num_rows)
    _require(fits, "a length that its arrays do not have", like)


def _check_chunk(state: State, like: Any, _: Any) -> None:
    keys, values, offset, chunk_size, start = state
    _require(chunk_size == like.chunk_size, f"a chunk size other than {like.chunk_size}", like)
    num_rows = _num_rows((keys, values), (like.keys, like.values), like)
    fits = _is_number(offset, 0, 2**31 - 1) and _is_number(start, 0, offset) and offset - start <= num_rows
    _require(fits, "a length that its arrays do not have", like)


def _check_arrays(state: State, like: Any, longer: Any) -> None:
    arrays, *padding = state
    _require(isinstance(arrays, tuple) and len(arrays) == len(like.cache), "another number of arrays", like)
    for array, like_array, longer_array in zip(arrays, like.cache, longer.cache, strict=True):
        if like_array is None:
            _require(array is None, "arrays where it should have none", like)
            continue
        # Most arrays have one shape at any length. But some contain the last tokens, of which there may be few.
        growing = [i for i, (a, b) in enumerate(zip(like_array.shape, longer_array.shape, strict=True)) if a != b]
        _require(_have_same_form(array, like_array, growing), "arrays of another shape", like)
    _require(all(number is None for number in padding), "padding, which only a batch of texts has", like)


def _make(state: State, kind: type) -> Any:
    return kind.from_state(state)  # type: ignore[attr-defined]


def _make_quantized(state: State, kind: type) -> Any:
    keys, values, *numbers = state
    return _make((list(keys), list(values), *numbers), kind)


def _make_arrays(state: State, kind: type) -> Any:
    arrays, *padding = state
    return _make((list(arrays), *padding), kind)


@attrs.frozen
class _Kind:
    """How the state of one cache class is taken out, checked, and made into a cache.

    Attributes:
        take: from a cache to its state.
        check: (state, like, longer) as for `put_state`; raises `MisfitError`.
        make: from a checked state, and the class, to a cache.
    """

    take: Callable[[Any], State]
    check: Callable[[State, Any, Any], None]
    make: Callable[[State, type], Any] = _make


_KINDS: dict[type, _Kind] = {
    KVCache: _Kind(_take_up_to_offset, _check_kv),
    QuantizedKVCache: _Kind(_take_up_to_offset, _check_quantized, _make_quantized),
    ConcatenateKVCache: _Kind(_take_up_to_offset, _check_concatenated),
    RotatingKVCache: _Kind(_take_rotating, _check_rotating),
    SlidingWindowCache: _Kind(_take_window, _check_rotating),
    ChunkedKVCache: _Kind(_take_chunk, _check_chunk),
    ArraysCache: _Kind(_take_arrays, _check_arrays, _make_arrays),
}
