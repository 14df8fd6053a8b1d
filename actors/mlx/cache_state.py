"""What a layer's cache holds, taken out of it and put into another: for files.

mlx-lm's cache classes each have `state` and `from_state`, and those are what is used here. But a class is never named
by a file: a state goes into a cache of the kind that the model makes for itself, and only where it fits there. So
what a file says is compared with that, number by number and shape by shape, before a model works on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

State = Any
"""Arrays, whole numbers and None, in tuples: the `state` of a cache."""


@attrs.frozen
class LayerState:
    """What one layer's cache holds, or held at some length.

    Attributes:
        kind: the name of its class.
        state: see `State`; None for a `CacheList`.
        parts: of a `CacheList`, its caches.
    """

    kind: str
    state: State = None
    parts: tuple[LayerState, ...] = ()


class MisfitError(Exception):
    """A state that does not fit the cache that it is meant for; says why."""


def can_take_state(layer: Any) -> bool:
    """Whether a layer's state can be taken, and put into another cache."""
    if type(layer) is CacheList:
        return all(can_take_state(part) for part in layer.caches)
    return type(layer) in _KINDS


def take_state(layer: Any) -> LayerState:
    """What a layer holds, without the room for more that its buffers have; arrays may be lazy.

    What is written into the cache later does not show in it.
    """
    if type(layer) is CacheList:
        return LayerState("CacheList", parts=tuple(take_state(part) for part in layer.caches))
    return LayerState(type(layer).__name__, _as_view(_KINDS[type(layer)].take(layer)))


def put_state(taken: LayerState, like: Any, longer: Any) -> Any:
    """A cache that holds a state.

    Args:
        taken: of a layer of the same model.
        like: the same layer's cache as it is when it holds one token, for kind, bounds, shapes and number formats.
        longer: the same when it holds some more, to tell what depends on that.

    Raises: MisfitError: the state is none of such a cache.
    """
    if type(like) is CacheList:
        _check_parts(taken, like)
        pairs = zip(like.caches, longer.caches, strict=True)
        return CacheList(*(put_state(part, *pair) for part, pair in zip(taken.parts, pairs, strict=True)))
    if type(like) not in _KINDS:
        raise MisfitError(f"nothing is known of the model's {type(like).__name__}")
    if taken.kind != type(like).__name__:
        raise MisfitError(f"it has a {taken.kind[:40]} where the model has a {type(like).__name__}")
    kind = _KINDS[type(like)]
    _require(isinstance(taken.state, tuple) and len(taken.state) == len(like.state), "a state of another form", like)
    kind.check(taken.state, like, longer)
    return kind.make(taken.state, type(like))


def take_prefix_checkpoint(layer: Any) -> LayerState:
    """What it takes to bring a layer back to where it is now, once it has gone on.

    Where rows stay as they were written, that is their number.
    """
    if type(layer) is CacheList:
        return LayerState("CacheList", parts=tuple(take_prefix_checkpoint(part) for part in layer.caches))
    if type(layer) is KVCache:
        return LayerState("KVCache", (None, None, layer.offset))
    return take_state(layer)


def put_prefix_checkpoint(taken: LayerState, length: int, layer: Any, like: Any, longer: Any) -> Restore:
    """What brings a layer back, as often as it is called.

    Args:
        taken: by `take_prefix_checkpoint`.
        length: tokens that the layer held then.
        layer: has gone on from there.
        like, longer: as for `put_state`.

    Raises: MisfitError: this is no state that such a layer had at that length.
    """
    if type(layer) is CacheList:
        _check_parts(taken, like)
        others = zip(layer.caches, like.caches, longer.caches, strict=True)
        parts = [put_prefix_checkpoint(part, length, *three) for part, three in zip(taken.parts, others, strict=True)]

        def restore_parts() -> None:
            for restore in parts:
                restore()

        return restore_parts
    if type(layer) is KVCache:
        fits = taken.kind == "KVCache" and isinstance(taken.state, tuple) and len(taken.state) == 3
        fits = fits and _is_number(taken.state[2], length, min(length, layer.offset))
        _require(fits, "another length in a pin", like)

        def cut() -> None:
            layer.offset = length

        return cut
    cached_tokens = list(lengths(put_state(taken, like, longer)))
    _require(all(one == length for one in cached_tokens), "another length in a pin", like)
    kind = _KINDS[type(layer)]

    def restore() -> None:
        # By views, anew each time: what is written after a first restore must not show in a second.
        vars(layer).update(vars(kind.make(_as_view(taken.state), type(layer))))

    return restore


# --- by class -------------------------------------------------------------------------------------


def _check_parts(taken: LayerState, like: CacheList) -> None:
    _require(taken.kind == "CacheList" and len(taken.parts) == len(like.caches), "other parts", like)


def _require(fits: bool, what: str, like: Any) -> None:
    if not fits:
        raise MisfitError(f"its {type(like).__name__} has {what}")


def _is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _have_same_form(array: Any, other: mx.array, growing: Sequence[int]) -> bool:
    """Whether two arrays differ in no more than their contents, and in their lengths along some axes."""
    if not isinstance(array, mx.array) or array.ndim != other.ndim:
        return False
    if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(other.dtype, mx.floating):
        return False
    return all(a == b or i in growing for i, (a, b) in enumerate(zip(array.shape, other.shape, strict=True)))


def _num_rows(buffers: Sequence[Any], like: Sequence[mx.array], of: Any) -> int:
    """The rows that keys and values have room for, which must be the same number, and otherwise like others."""
    for buffer, other in zip(buffers, like, strict=True):
        _require(_have_same_form(buffer, other, [2]), "arrays of another shape", of)
    num_rows = {int(buffer.shape[2]) for buffer in buffers}
    _require(len(num_rows) == 1, "keys and values of different lengths", of)
    return num_rows.pop()


def _cut(state: State, num_rows: int) -> State:
    """Keys and values without the rows that nothing was written to yet."""
    if isinstance(state, (tuple, list)):
        return tuple(_cut(part, num_rows) for part in state)
    return state[..., :num_rows, :] if isinstance(state, mx.array) else state


def _as_view(state: State) -> State:
    """The same by other names: what is assigned to an array shows through every name of it, but not in a view."""
    if isinstance(state, (tuple, list)):
        return tuple(_as_view(part) for part in state)
    return state[...] if isinstance(state, mx.array) else state


def _take_up_to_offset(layer: Any) -> State:
    return _cut(layer.state, layer.offset)


def _take_chunk(layer: ChunkedKVCache) -> State:
    return _cut(layer.state, layer.offset - layer.start_position)


def _take_rotating(layer: RotatingKVCache) -> State:
    # Once it has gone round, every row is one of the window's.
    return _cut(layer.state, layer.offset) if layer._idx == layer.offset else layer.state


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
        # Gone round: the next row to write is any behind those that are kept. After several tokens at once there
        # are more rows than the window has, in order.
        has_gone_round = max_size <= num_rows and _is_number(offset, num_rows, 2**31 - 1)
        fits = has_gone_round and _is_number(index, keep if num_rows == max_size else num_rows, num_rows)
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
    for array, one, other in zip(arrays, like.cache, longer.cache, strict=True):
        if one is None:
            _require(array is None, "arrays where it should have none", like)
            continue
        # Mostly of one shape, whatever they have seen; but some are the last tokens, of which there may be few.
        growing = [i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        _require(_have_same_form(array, one, growing), "arrays of another shape", like)
    _require(all(part is None for part in padding), "padding, as one of several texts has", like)


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
    """How a class's state is taken out, looked at and put back."""

    take: Callable[[Any], State]
    check: Callable[[State, Any, Any], None]
    make: Callable[[State, type], Any] = _make


_KINDS: dict[type, _Kind] = {
    KVCache: _Kind(_take_up_to_offset, _check_kv),
    QuantizedKVCache: _Kind(_take_up_to_offset, _check_quantized, _make_quantized),
    ConcatenateKVCache: _Kind(_take_up_to_offset, _check_concatenated),
    RotatingKVCache: _Kind(_take_rotating, _check_rotating),
    ChunkedKVCache: _Kind(_take_chunk, _check_chunk),
    ArraysCache: _Kind(_take_arrays, _check_arrays, _make_arrays),
}
