"""Caches of several texts, one a row, for forward passes that all of them share.

A row holds its text from slot 0 on, and has a length of its own. A pass of width W writes W slots after each row's end,
even if the row feeds fewer tokens, and the mask hides from each token the slots after it. So a rewind only lowers the
length, and copies nothing. Models of mlx-lm ask their caches for masks and offsets, so they run unchanged.

A sliding window is a ring with slots for the window and the widest pass together, so a rejected proposal has
overwritten only tokens that were out of sight. The recurrent state from before a pass is kept, and restored for the
rows that reject a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from protocol.prefill_chunks import MAX_CHUNK_TOKENS

STEP = 256  # slots by which buffers grow

MAX_WIDTH = 80  # the widest pass that a ring allows


class RowKVCache:
    """Keys and values of several texts: one layer's cache of a batch. `Rows` and mlx-lm's model call it."""

    max_width = MAX_CHUNK_TOKENS  # the widest pass
    is_recurrent = False  # whether a row can only go back to where it was before its last pass
    # Whether all tokens of a row stay in it: it can go back to any length, and takes as much memory as the longest row.
    keeps_all = True

    def __init__(self) -> None:
        self.keys: mx.array | None = None  # (B, heads, slots, width of a head); None while there is no row
        self.values: mx.array | None = None
        # (B,) for mlx-lm's models: the tokens in each row, those of the pass included once they are written.
        self.offset = mx.zeros((0,), mx.int32)
        self._end = 0

    def begin(self, lengths: Sequence[int], widths: Sequence[int]) -> None:
        """Prepare a pass that reads `widths` (B,) tokens, >= 0, of rows that hold `lengths` (B,) tokens."""
        self.offset = mx.array(tuple(lengths), mx.int32)
        self._end = max(lengths) + max(widths)
        if self.keys is not None and self.values is not None:
            grown = self._num_slots_for(self._end) - self.keys.shape[2]
            self.keys, self.values = _grown(self.keys, grown), _grown(self.values, grown)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (B, heads, W, width of a head) after each row's end. Returns: all slots that the pass may see."""
        if self.keys is None or self.values is None:  # all texts are empty
            self.keys, self.values = self._zeros_like(keys), self._zeros_like(values)
        slots = self._slots(keys.shape[2])[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, slots, keys, axis=2)
        self.values = mx.put_along_axis(self.values, slots, values, axis=2)
        self.offset = self.offset + keys.shape[2]  # a new array: some models keep a reference to the offset from before
        return self._visible(self.keys), self._visible(self.values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """(B, 1, N, slots) bool: which slots each token of the next pass, of width N, sees."""
        slots = mx.arange(self._end)
        positions = (self.offset[:, None] + mx.arange(N))[:, None, :, None]
        mask = slots <= positions
        return mask if window_size is None else mask & (slots > positions - window_size)

    def restore(self, rows: Sequence[bool]) -> None:
        """Restore the state from before the last pass in the rows that are True. Here a smaller length is enough."""

    def join(self, single: Any, length: int) -> None:
        """Add the text of a single text's cache, which gives it up, as a row. An empty text joins only empty ones."""
        if length > 0:
            self.keys = self._joined(self.keys, single.keys[:, :, :length])
            self.values = self._joined(self.values, single.values[:, :, :length])
            single.keys = single.values = None

    def absorb(self, others: Any) -> None:
        """Add all rows of another cache of this kind, which gives them up."""
        assert others.keys is not None
        assert others.values is not None
        self.keys, self.values = self._joined(self.keys, others.keys), self._joined(self.values, others.values)
        others.keys = others.values = None

    def copy_to(self, row: int, length: int, single: Any) -> None:
        """Give the text of a row to a single text's cache, which is empty or has joined."""
        assert self.keys is not None
        assert self.values is not None
        single.keys = mx.contiguous(self.keys[row : row + 1, :, :length])
        single.values = mx.contiguous(self.values[row : row + 1, :, :length])
        single.offset = length

    def remove(self, row: int) -> None:
        """Remove a row."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = _without(self.keys, row), _without(self.values, row)

    def shrink(self, longest: int) -> None:
        """Drop what rows of at most `longest` tokens do not need; another row, which may be longer, is removed next."""
        num_slots = self._num_slots_for(max(1, longest))
        if self.keys is not None and self.values is not None and self.keys.shape[2] > num_slots:
            # Views, which `remove` copies.
            self.keys, self.values = self.keys[:, :, :num_slots], self.values[:, :, :num_slots]

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """The arrays of all rows, to be evaluated."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Memory of all rows."""
        return 0 if self.keys is None or self.values is None else int(self.keys.nbytes + self.values.nbytes)

    def _zeros_like(self, written: mx.array) -> mx.array:
        num_rows, heads, _, width = written.shape
        return mx.zeros((num_rows, heads, self._num_slots_for(self._end), width), written.dtype)

    def _num_slots_for(self, num_tokens: int) -> int:
        return -(-num_tokens // STEP) * STEP

    def _slots(self, width: int) -> mx.array:
        return self.offset[:, None] + mx.arange(width)

    def _visible(self, buffer: mx.array) -> mx.array:
        return buffer[:, :, : self._end]

    def _joined(self, buffer: mx.array | None, text: mx.array) -> mx.array:
        num_slots = max(self._num_slots_for(text.shape[2]), 0 if buffer is None else buffer.shape[2])
        row = _grown(text, num_slots - text.shape[2])
        if buffer is None:
            return row
        return mx.concatenate([_grown(buffer, num_slots - buffer.shape[2]), row])


class RowRingCache(RowKVCache):
    """Keys and values of the last tokens of several texts: the token at position p is in slot p modulo the slots."""

    max_width = MAX_WIDTH
    keeps_all = False

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self._num_slots = window + MAX_WIDTH
        self._first_held: list[int] = []  # by row, the first position whose token no pass has overwritten

    def begin(self, lengths: Sequence[int], widths: Sequence[int]) -> None:
        super().begin(lengths, widths)
        # Until the longest row has filled the ring, no slot after its end holds anything.
        self._end = min(self._end, self._num_slots)
        self._first_held = [
            max(first, length + max(widths) - self._num_slots)
            for first, length in zip(self._first_held, lengths, strict=True)
        ]

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        slots = mx.arange(self._end)
        last = (self.offset + (N - 1))[:, None]
        # The position of the token in each slot, once the pass is written; negative where there was none yet.
        held = last - (last - slots) % self._num_slots
        positions = (self.offset[:, None] + mx.arange(N))[:, :, None]
        held = held[:, None, :]
        mask = (held >= 0) & (held <= positions) & (held > positions - (window_size or self.window))
        return mask[:, None]

    def join(self, single: Any, length: int) -> None:
        if length == 0:
            self._first_held.append(0)
            return
        keys, values, *_ = single.state
        self.keys = self._joined(self.keys, self._ring(keys, length))
        self.values = self._joined(self.values, self._ring(values, length))
        self._first_held.append(length - min(keys.shape[2], self._num_slots))
        single.keys = single.values = None

    def absorb(self, others: Any) -> None:
        super().absorb(others)
        assert isinstance(others, RowRingCache)
        self._first_held += others._first_held

    def copy_to(self, row: int, length: int, single: Any) -> None:
        assert self.keys is not None
        assert self.values is not None
        # More tokens than the window has, so that the text can be trimmed at least to before its last pass.
        first = self._first_held[row]
        slots = mx.arange(first, length) % self._num_slots
        single.keys, single.values = self.keys[row : row + 1, :, slots], self.values[row : row + 1, :, slots]
        single.offset, single._idx = length, length - first

    def remove(self, row: int) -> None:
        super().remove(row)
        del self._first_held[row]

    def shrink(self, longest: int) -> None:
        """A ring has no more slots than its window needs."""

    def _num_slots_for(self, num_tokens: int) -> int:
        return min(super()._num_slots_for(num_tokens), self._num_slots)

    def _slots(self, width: int) -> mx.array:
        return super()._slots(width) % self._num_slots

    def _ring(self, text: mx.array, length: int) -> mx.array:
        num_held = min(text.shape[2], self._num_slots)
        slots = mx.arange(length - num_held, length) % self._num_slots
        ring = mx.zeros((*text.shape[:2], self._num_slots_for(length), text.shape[3]), text.dtype)
        return mx.put_along_axis(ring, slots[None, None, :, None], text[:, :, -num_held:], axis=2)


class RowArraysCache(ArraysCache):
    """Recurrent states of several texts, stacked."""

    max_width = MAX_CHUNK_TOKENS
    is_recurrent = True
    keeps_all = False
    cache: list[Any]
    lengths: mx.array | None  # type: ignore[assignment]

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._before: list[Any] = []

    def begin(self, lengths: Sequence[int], widths: Sequence[int]) -> None:
        self._before = list(self.cache)
        # Lengths make a mask, which models that read no lengths do not support. So there are none without padding.
        self.lengths = mx.array(tuple(widths), mx.int32) if len(set(widths)) > 1 else None

    def restore(self, rows: Sequence[bool]) -> None:
        if all(rows):
            self.cache = list(self._before)
        elif any(rows):
            chosen = mx.array(list(rows))
            self.cache = [
                mx.where(chosen.reshape(-1, *(1,) * (after.ndim - 1)), before, after)
                for before, after in zip(self._before, self.cache, strict=True)
            ]

    def join(self, single: Any, length: int) -> None:
        if length > 0:
            self.absorb(single)

    def absorb(self, others: Any) -> None:
        """Also takes in the states of a single text."""
        self.cache = [
            state if rows is None else mx.concatenate([rows, state])
            for rows, state in zip(self.cache, others.cache, strict=True)
        ]
        others.cache = [None] * len(self.cache)

    def copy_to(self, row: int, length: int, single: Any) -> None:
        single.cache = [mx.contiguous(state[row : row + 1]) for state in self.cache]

    def remove(self, row: int) -> None:
        self.cache = [None if state is None else _without(state, row) for state in self.cache]

    def shrink(self, longest: int) -> None:
        """States have one size."""


RowCache = RowKVCache | RowArraysCache


def _grown(buffer: mx.array, num_slots: int) -> mx.array:
    return mx.pad(buffer, [(0, 0), (0, 0), (0, num_slots), (0, 0)]) if num_slots > 0 else buffer


def _without(buffer: mx.array, row: int) -> Any:
    """None if no row is left."""
    return None if buffer.shape[0] == 1 else mx.concatenate([buffer[:row], buffer[row + 1 :]])
