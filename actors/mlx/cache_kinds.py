"""Cache kinds: all that Outrider knows about each cache class. No other module tests for a cache class.

A *trim* drops the tail of a cache, to any length. A *checkpoint* keeps the state from before a feed, and restores it.
What mlx-lm's classes say of themselves is not reliable: `is_trimmable` is about the present moment, so a rotating cache
that fills in the middle of a round cannot be trimmed back; `ConcatenateKVCache.trim` keeps the tokens.

A file never chooses a class: a state goes into a cache of the class that the model makes, once it was compared with
one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from actors.mlx.row_caches import RowArraysCache, RowKVCache, RowRingCache
from actors.mlx.sliding_window import MAX_TRIM, NUM_SPARE, SlidingWindowCache

Restore = Callable[[], None]

State = Any
"""The `state` of a cache: arrays, whole numbers and None, in nested tuples."""


@attrs.frozen
class LayerState:
    """The state of one layer's cache, of a class of mlx-lm. For a `CacheList`, `inner` has the states of its caches."""

    kind: str
    state: State = None
    inner: tuple[LayerState, ...] = ()

    @property
    def arrays(self) -> State:
        """All of the state, for `mx.eval`."""
        return [inner.arrays for inner in self.inner] if self.inner else self.state

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are quantised."""
        return self.kind == QuantizedKVCache.__name__

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return _num_bytes(self.arrays)


class MisfitError(Exception):
    """A state does not fit the cache that it is meant for."""


class CacheKind:
    """The kind of a cache class. Its methods take one layer's cache of one text."""

    cache_class: type = object
    always_trims = False  # whether any tail can be trimmed, however much was fed
    has_slots = False  # whether `keys` and `values` have a slot for each token, in the order of the text
    kept: tuple[str, ...] = ()  # the attributes that a checkpoint keeps
    is_overwritten = False  # whether the cache writes into arrays among them, where a restored checkpoint reads
    can_keep_state = True  # whether the state can be kept, restored, and put into another cache

    @property
    def can_be_row(self) -> bool:
        """Whether the text of such a cache can be a row of a batch."""
        return type(self).row_cache is not CacheKind.row_cache

    # --- how it reads ---

    def name(self, layer: Any) -> str:
        """For reports, such as "SlidingWindowCache(512)" or "CacheList(KVCache, KVCache)"."""
        size = self.window(layer)
        return type(layer).__name__ if size is None else f"{type(layer).__name__}({size})"

    def length(self, layer: Any) -> int | None:
        """Tokens that the cache has processed; None if it keeps no count."""
        return offset if isinstance(offset := getattr(layer, "offset", None), int) else None

    def window(self, layer: Any) -> int | None:
        """Tokens after which the cache begins to forget; None if it never does."""
        return getattr(layer, "max_size", None)

    def reads_alike(self, layer: Any, num_tokens: int) -> bool:
        """Whether a text of `num_tokens` tokens is read the same way, however it is divided into passes."""
        return not getattr(layer, "keep", 0) or bool(num_tokens <= layer.max_size)

    def working(self, layer: Any) -> Any:
        """The cache that a sequence works with, in place of the empty one that the model has made."""
        return layer

    def compact(self, layer: Any) -> None:
        """After a wide pass, keep nothing of its memory but the state."""

    # --- how it is rewound ---

    def can_trim_after(self, layer: Any, num_tokens: int, back_to: int | None = None) -> bool:
        """Whether it could take `num_tokens` more and then be trimmed to `back_to`, or to where it is now."""
        return self.always_trims

    def trim(self, layer: Any, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens; `can_trim_after` must have been true before they were fed."""
        layer.trim(num_tokens)

    def snapshot(self, layer: Any) -> Restore:
        """Keep the state. Returns a function that restores it, as often as it is called.

        Arrays are kept by reference, or as views if the cache assigns into them: a view costs a copy of the buffer at
        the next write.
        """
        state = {name: self._kept(getattr(layer, name)) for name in self.kept}

        def restore() -> None:
            for name, value in state.items():
                # A view of the view, so that writes after a first restore do not show in a second.
                setattr(layer, name, self._kept(value))

        return restore

    def most_slots(self, layer: Any) -> int | None:
        """The most slots for tokens, without those that a wide pass adds; None if the cache has one for each token."""
        return None

    def slot_bytes(self, layer: Any, longer: Any, num_more: int) -> int:
        """Bytes of a slot, where `longer` holds `num_more` tokens more than the cache; 0 if states have one size."""
        if getattr(layer, "keys", None) is None:
            return int(longer.nbytes - layer.nbytes) // num_more
        keys = layer.keys[0] if isinstance(layer.keys, (list, tuple)) else layer.keys  # quantised ones have parts
        return int(layer.nbytes) // int(keys.shape[-2])

    def checkpoint_bytes(self, layer: Any) -> int:
        """Bytes that a checkpoint adds in memory, once the cache has changed."""
        return 0 if self.kept == ("offset",) else int(layer.nbytes)

    def _kept(self, value: Any) -> Any:
        if isinstance(value, list):
            return list(value)
        return value[...] if self.is_overwritten and isinstance(value, mx.array) else value

    # --- how it is saved and copied ---

    @property
    def state_name(self) -> str:
        """The name of the class in files."""
        return self.cache_class.__name__

    def take_state(self, layer: Any) -> LayerState:
        """The state, without the unused rows of buffers. Arrays may be lazy; later writes do not change them."""
        return LayerState(self.state_name, _as_view(self.state(layer)))

    def put_state(self, taken: LayerState, like: Any, longer: Any) -> Any:
        """A new cache with the state `taken`, which comes from a file and may be anything.

        It is compared with two caches of the model's layer: `like` holds one token, and `longer` some more, so that the
        two show which shapes depend on the length. Raises: MisfitError: this is not the state of such a cache.
        """
        if not self.can_keep_state:
            raise MisfitError(f"the model has a {type(like).__name__}, a cache class that is not known")
        if taken.kind != self.state_name:
            raise MisfitError(f"it has a {taken.kind[:40]} where the model has a {self.state_name}")
        self._require(_has_parts(taken.state, len(like.state)), "a state of another form")
        self.check_state(taken.state, like, longer)
        return self.made(taken.state)

    def take_prefix_checkpoint(self, layer: Any) -> LayerState:
        """The state with which the cache can later be rewound to its present length."""
        return self.take_state(layer)

    def check_prefix_checkpoint(self, taken: LayerState, length: int, layer: Any, like: Any, longer: Any) -> None:
        """Check that `layer` can go back to `taken` at `length`; see `put_state`. Raises: MisfitError."""
        put_length = self.length(self.put_state(taken, like, longer))
        self._require(put_length in (length, None), "another length in a prefix checkpoint")

    def go_back(self, layer: Any, taken: LayerState) -> None:
        """Rewind a cache to a prefix checkpoint."""
        self.fill(layer, taken)

    def copied(self, layer: Any) -> Any:
        """A new cache with the same tokens. Neither shows in the other; they share memory until one is written."""
        return copy.copy(layer) if layer.empty() else self.made(self.take_state(layer).state)

    def fill(self, layer: Any, taken: LayerState) -> None:
        """Give a cache a state that was taken from a cache of the same layer, or checked. A state can be used again."""
        # New views each time, so that writes after a first call do not show in a second.
        vars(layer).update(vars(self.made(_as_view(taken.state))))

    def state(self, layer: Any) -> State:
        """The state that `take_state` takes."""
        return _cut(layer.state, layer.offset)

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        """Compare a state, which has as many parts as that of `like`, with two caches; see `put_state`."""
        raise NotImplementedError

    def made(self, state: State) -> Any:
        """A cache with a state that was checked."""
        return self.cache_class.from_state(state)  # type: ignore[attr-defined]

    def row_cache(self, layer: Any) -> Any:
        """An empty `RowCache` for this layer, in which the texts of such caches become rows."""
        raise NotImplementedError

    # --- for checks ---

    def _require(self, fits: bool, misfit: str) -> None:
        if not fits:
            raise MisfitError(f"its {self.state_name} has {misfit}")

    def _num_rows(self, buffers: Sequence[Any], like_buffers: Sequence[mx.array]) -> int:
        """Compare the form of keys and values with those in a cache of the model. Returns: their number of rows."""
        for buffer, like_buffer in zip(buffers, like_buffers, strict=True):
            self._require(_have_same_form(buffer, like_buffer, [2]), "arrays of another shape")
        num_rows = {int(buffer.shape[2]) for buffer in buffers}
        self._require(len(num_rows) == 1, "keys and values of different lengths")
        return num_rows.pop()

    def _require_length(self, fits: bool) -> None:
        self._require(fits, "a length that its arrays do not have")


class UnknownKind(CacheKind):
    """The kind of all other classes: a model can read with such a cache, but it is not rewound, saved or shared."""

    can_keep_state = False


class KVCacheKind(CacheKind):
    """Rows stay as they were written, and those beyond the offset are never read."""

    cache_class = KVCache
    kept = ("offset",)
    always_trims = has_slots = True

    def take_prefix_checkpoint(self, layer: KVCache) -> LayerState:
        return LayerState(self.state_name, (None, None, layer.offset))

    def check_prefix_checkpoint(self, taken: LayerState, length: int, layer: KVCache, like: Any, longer: Any) -> None:
        fits = taken.kind == self.state_name and _has_parts(taken.state, 3)
        fits = fits and _is_number(taken.state[2], length, min(length, layer.offset))
        self._require(fits, "another length in a prefix checkpoint")

    def go_back(self, layer: KVCache, taken: LayerState) -> None:
        layer.offset = taken.state[2]

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        keys, values, offset = state
        num_rows = self._num_rows((keys, values), (like.keys, like.values))
        self._require_length(_is_number(offset, 0, num_rows))

    def row_cache(self, layer: Any) -> Any:
        return RowKVCache()


class QuantizedKVCacheKind(CacheKind):
    """As `KVCacheKind`, but for one text only."""

    cache_class = QuantizedKVCache
    kept = ("offset",)
    always_trims = has_slots = True

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        keys, values, offset, group_size, bits = state
        self._require(_has_parts(keys, 3) and _has_parts(values, 3), "arrays of another form")
        num_rows = self._num_rows((*keys, *values), (*like.keys, *like.values))
        self._require_length(_is_number(offset, 0, num_rows))
        self._require((group_size, bits) == (like.group_size, like.bits), "another quantisation")

    def made(self, state: State) -> Any:
        keys, values, *numbers = state
        return super().made((list(keys), list(values), *numbers))


class ConcatenateKVCacheKind(CacheKind):
    """Arrays are replaced when they change."""

    cache_class = ConcatenateKVCache
    kept = ("keys", "values", "offset")
    always_trims = True

    def trim(self, layer: ConcatenateKVCache, num_tokens: int) -> None:
        layer.offset -= num_tokens
        layer.keys, layer.values = (state[..., : layer.offset, :] for state in layer.state)

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        self._num_rows(state, (like.keys, like.values))


class RotatingKVCacheKind(CacheKind):
    """Once the cache is full, a new token overwrites the oldest one, except that the first `keep` stay."""

    cache_class: type = RotatingKVCache
    kept = ("keys", "values", "offset", "_idx")
    is_overwritten = True

    def working(self, layer: RotatingKVCache) -> RotatingKVCache:
        """A cache that can be trimmed even when full. One that keeps its first tokens stays, as its passes matter."""
        return SlidingWindowCache(layer.max_size) if layer.keep == 0 else layer

    def most_slots(self, layer: RotatingKVCache) -> int:
        return int(layer.max_size)

    def can_trim_after(self, layer: RotatingKVCache, num_tokens: int, back_to: int | None = None) -> bool:
        return bool(layer.offset + num_tokens < layer.max_size)

    def state(self, layer: RotatingKVCache) -> State:
        # Once the cache has wrapped round, every row belongs to the window.
        return _cut(layer.state, layer.offset) if layer._idx == layer.offset else layer.state

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        keys, values, offset, keep, max_size, index = state
        self._require((keep, max_size) == (like.keep, like.max_size), f"a window other than {like.max_size}")
        num_rows = self._num_rows((keys, values), (like.keys, like.values))
        if num_rows == offset:
            fits = _is_number(index, num_rows, num_rows) or (num_rows == max_size and _is_number(index, keep, max_size))
        else:
            # Wrapped round: the next row is any after the first `keep`; or there are more rows than the window has, in
            # order.
            has_wrapped = max_size <= num_rows and _is_number(offset, num_rows, 2**31 - 1)
            fits = has_wrapped and _is_number(index, keep if num_rows == max_size else num_rows, num_rows)
        self._require_length(fits)


class SlidingWindowCacheKind(RotatingKVCacheKind):
    """In files a `RotatingKVCache`. Tokens before a checkpoint are written only after a trim to below it."""

    cache_class = SlidingWindowCache
    is_overwritten = False
    state_name = RotatingKVCache.__name__

    def most_slots(self, layer: SlidingWindowCache) -> int:  # type: ignore[override]
        return int(layer.max_size) + NUM_SPARE

    def can_trim_after(self, layer: SlidingWindowCache, num_tokens: int, back_to: int | None = None) -> bool:  # type: ignore[override]
        return layer.can_trim_after(num_tokens, layer.offset if back_to is None else back_to)

    def take_prefix_checkpoint(self, layer: Any) -> LayerState:
        keys, values, *numbers = self.state(layer, num_past=0)
        # Copies of the window: slices would keep the whole buffer.
        return LayerState(self.state_name, (mx.contiguous(keys), mx.contiguous(values), *numbers))

    def state(self, layer: Any, num_past: int = MAX_TRIM) -> State:
        """The tokens of the window, and up to `num_past` before them, by which the cache can be trimmed."""
        keys, values, offset, keep, max_size, num_held = layer.state
        num_taken = min(num_held, max_size + num_past)
        first = num_held - num_taken
        return keys[..., first:, :], values[..., first:, :], offset, keep, max_size, num_taken

    def row_cache(self, layer: Any) -> Any:
        return RowRingCache(layer.max_size)


class ChunkedKVCacheKind(CacheKind):
    """A token attends to its chunk, from the chunk's beginning. Each feed first drops what lies over a chunk back."""

    cache_class = ChunkedKVCache
    kept = ("keys", "values", "offset", "start_position")
    is_overwritten = True

    def most_slots(self, layer: ChunkedKVCache) -> int:
        return int(layer.chunk_size) + int(layer.step)

    def can_trim_after(self, layer: ChunkedKVCache, num_tokens: int, back_to: int | None = None) -> bool:
        first_cached = max(layer.start_position, layer.offset - layer.chunk_size if num_tokens else 0)
        length = layer.offset if back_to is None else back_to
        # After feeds across the end of a chunk, the token to go back to may lack a part of its chunk.
        return bool(length // layer.chunk_size * layer.chunk_size >= first_cached)

    def state(self, layer: ChunkedKVCache) -> State:
        return _cut(layer.state, layer.offset - layer.start_position)

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        keys, values, offset, chunk_size, start = state
        self._require(chunk_size == like.chunk_size, f"a chunk size other than {like.chunk_size}")
        num_rows = self._num_rows((keys, values), (like.keys, like.values))
        fits = _is_number(offset, 0, 2**31 - 1) and _is_number(start, 0, offset) and offset - start <= num_rows
        self._require_length(fits)


class ArraysCacheKind(CacheKind):
    """Recurrent states, which are replaced when they change. They do not tell how many tokens they have read."""

    cache_class = ArraysCache
    kept = ("cache", "left_padding", "lengths")

    def compact(self, layer: ArraysCache) -> None:
        # A slice of what the pass has computed, such as the last inputs of a convolution, would keep all of it.
        layer.cache = [None if array is None else mx.contiguous(array) for array in layer.cache]

    def slot_bytes(self, layer: ArraysCache, longer: ArraysCache, num_more: int) -> int:
        return 0

    def state(self, layer: ArraysCache) -> State:
        return layer.state

    def check_state(self, state: State, like: Any, longer: Any) -> None:
        arrays, *padding = state
        self._require(_has_parts(arrays, len(like.cache)), "another number of arrays")
        for array, like_array, longer_array in zip(arrays, like.cache, longer.cache, strict=True):
            if like_array is None:
                self._require(array is None, "arrays where it should have none")
                continue
            # Most arrays have one shape at any length; some contain the last tokens, of which there may be few.
            growing = [i for i, (a, b) in enumerate(zip(like_array.shape, longer_array.shape, strict=True)) if a != b]
            self._require(_have_same_form(array, like_array, growing), "arrays of another shape")
        self._require(all(number is None for number in padding), "padding, which only a batch of texts has")

    def made(self, state: State) -> Any:
        arrays, *padding = state
        return super().made((list(arrays), *padding))

    def row_cache(self, layer: Any) -> Any:
        return RowArraysCache(len(layer.cache))


class CacheListKind(CacheKind):
    """Several caches of one layer, of any kinds. `kinds_of` yields each of them, and not the list."""

    cache_class = CacheList

    def name(self, layer: CacheList) -> str:
        return f"CacheList({', '.join(kind_of(inner).name(inner) for inner in layer.caches)})"

    def working(self, layer: CacheList) -> CacheList:
        return CacheList(*(kind_of(inner).working(inner) for inner in layer.caches))

    def take_state(self, layer: CacheList) -> LayerState:
        return LayerState(self.state_name, inner=tuple(kind_of(inner).take_state(inner) for inner in layer.caches))

    def put_state(self, taken: LayerState, like: CacheList, longer: CacheList) -> CacheList:
        self._check_inner(taken, like)
        caches = zip(taken.inner, like.caches, longer.caches, strict=True)
        return CacheList(*(kind_of(pair[0]).put_state(inner, *pair) for inner, *pair in caches))

    def take_prefix_checkpoint(self, layer: CacheList) -> LayerState:
        inner = tuple(kind_of(inner).take_prefix_checkpoint(inner) for inner in layer.caches)
        return LayerState(self.state_name, inner=inner)

    def check_prefix_checkpoint(
        self, taken: LayerState, length: int, layer: CacheList, like: CacheList, longer: CacheList
    ) -> None:
        self._check_inner(taken, like)
        for inner, *caches in zip(taken.inner, layer.caches, like.caches, longer.caches, strict=True):
            kind_of(caches[0]).check_prefix_checkpoint(inner, length, *caches)

    def go_back(self, layer: CacheList, taken: LayerState) -> None:
        for inner, taken_inner in zip(layer.caches, taken.inner, strict=True):
            kind_of(inner).go_back(inner, taken_inner)

    def copied(self, layer: CacheList) -> CacheList:
        return CacheList(*(kind_of(inner).copied(inner) for inner in layer.caches))

    def fill(self, layer: CacheList, taken: LayerState) -> None:
        for inner, taken_inner in zip(layer.caches, taken.inner, strict=True):
            kind_of(inner).fill(inner, taken_inner)

    def row_cache(self, layer: CacheList) -> CacheList:
        return CacheList(*(kind_of(inner).row_cache(inner) for inner in layer.caches))

    def _check_inner(self, taken: LayerState, like: CacheList) -> None:
        self._require(taken.kind == self.state_name and len(taken.inner) == len(like.caches), "other caches in it")


KINDS: dict[type, CacheKind] = {
    kind.cache_class: kind
    for kind in (
        KVCacheKind(),
        QuantizedKVCacheKind(),
        ConcatenateKVCacheKind(),
        RotatingKVCacheKind(),
        SlidingWindowCacheKind(),
        ChunkedKVCacheKind(),
        ArraysCacheKind(),
        CacheListKind(),
    )
}
"""By class. A subclass may do anything otherwise, so it is not known by its base."""

_UNKNOWN = UnknownKind()


def kind_of(layer: Any) -> CacheKind:
    """The kind of a cache."""
    return KINDS.get(type(layer), _UNKNOWN)


def kinds_of(caches: Iterable[Any]) -> Iterator[tuple[CacheKind, Any]]:
    """Each cache with its kind; in place of a `CacheList`, those in it."""
    for layer in caches:
        if type(layer) is CacheList:
            yield from kinds_of(layer.caches)
        else:
            yield kind_of(layer), layer


def lengths_of(caches: Iterable[Any]) -> set[int]:
    """The numbers of tokens that some caches have processed, where they keep count."""
    return {length for kind, layer in kinds_of(caches) if (length := kind.length(layer)) is not None}


# --- states ---------------------------------------------------------------------------------------


def _has_parts(state: State, number: int) -> bool:
    return isinstance(state, tuple) and len(state) == number


def _is_number(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _have_same_form(array: Any, other: mx.array, growing: Sequence[int]) -> bool:
    """Whether two arrays differ only in their elements and in their lengths along the axes `growing`."""
    if not isinstance(array, mx.array) or array.ndim != other.ndim:
        return False
    if mx.issubdtype(array.dtype, mx.floating) != mx.issubdtype(other.dtype, mx.floating):
        return False
    return all(a == b or i in growing for i, (a, b) in enumerate(zip(array.shape, other.shape, strict=True)))


def _num_bytes(state: State) -> int:
    if isinstance(state, (tuple, list)):
        return sum(map(_num_bytes, state))
    return int(state.nbytes) if isinstance(state, mx.array) else 0


def _cut(state: State, num_rows: int) -> State:
    if isinstance(state, (tuple, list)):
        return tuple(_cut(inner, num_rows) for inner in state)
    return state[..., :num_rows, :] if isinstance(state, mx.array) else state


def _as_view(state: State) -> State:
    # An assignment into an array shows in its references, but not in its views.
    if isinstance(state, (tuple, list)):
        return tuple(_as_view(inner) for inner in state)
    return state[...] if isinstance(state, mx.array) else state
