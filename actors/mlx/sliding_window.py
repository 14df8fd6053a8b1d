"""The cache of a sliding window, which can be trimmed even when it is full.

mlx-lm's `RotatingKVCache` writes a new token over the oldest one, so what a rejected proposal has overwritten is lost.
Here new tokens are appended, and those that have left the window stay for a while. A model reads a slice that has, in
order, only the tokens that its own mask covers.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

# Tokens by which a full window can be trimmed: more than a drafter is ever ahead of its target, two proposals and one.
MAX_TRIM = 160
# Slots beyond the window's. When all are taken, the last tokens are copied to a new buffer.
NUM_SPARE = 256
STEP = 256  # slots by which a buffer grows until then


class SlidingWindowCache(RotatingKVCache):
    """Keys and values of the last tokens of a text, in order. A model computes the same with it as with mlx-lm's.

    Its buffers, (1, heads, slots, width of a head), grow to `NUM_SPARE` slots more than the window; or for a wide pass
    to window, `MAX_TRIM` and its width together, until they are next replaced. A slot is written once, unless a trim
    has dropped its token: a reference to the buffers, with the offset, is a checkpoint until a trim to below it.
    """

    keys: mx.array | None
    values: mx.array | None

    def __init__(self, max_size: int) -> None:
        super().__init__(max_size)  # type: ignore[no-untyped-call]
        self._num_seen = 0  # slots that the last pass read

    _idx: int  # tokens in the buffers: the last ones that were read. The name is mlx-lm's.

    @property
    def num_trimmable(self) -> int:
        """Tokens by which the cache can be trimmed now, so that the next one still has its whole window."""
        return self.offset if self._idx == self.offset else max(0, self._idx - self.max_size)

    def can_trim_after(self, num_tokens: int, back_to: int) -> bool:
        """Whether the cache could take `num_tokens` more, in any number of passes, and then be trimmed to a length."""
        first_kept = self.offset - self._idx
        if num_tokens > 0:
            first_kept = max(first_kept, self.offset + num_tokens - self.max_size - MAX_TRIM)
        return first_kept == 0 or back_to - first_kept >= self.max_size

    def is_trimmable(self) -> bool:
        return self.num_trimmable > 0

    def trim(self, n: int) -> int:
        n = min(n, self.num_trimmable)
        self.offset -= n
        self._idx -= n
        return n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write keys and values of a pass. Returns: those of all tokens that some token of it sees, in order."""
        width = keys.shape[2]
        end = self._idx + width
        if self.keys is not None and self.values is not None and end <= self.keys.shape[2]:
            self.keys[..., self._idx : end, :] = keys
            self.values[..., self._idx : end, :] = values
        else:
            num_kept = min(self._idx, self.max_size + MAX_TRIM)
            end = num_kept + width
            num_slots = self.max_size + NUM_SPARE
            if num_kept == self._idx:
                num_slots = min(num_slots, -(-end // STEP) * STEP)
            num_slots = max(num_slots, end)
            self.keys = self._moved(self.keys, num_kept, keys, num_slots - end)
            self.values = self._moved(self.values, num_kept, values, num_slots - end)
        self._idx = end
        self.offset += width
        self._num_seen = min(end, self.max_size - 1 + width)
        return self.keys_and_values()

    def _moved(self, buffer: mx.array | None, num_kept: int, new: mx.array, num_free: int) -> mx.array:
        parts = [] if buffer is None else [buffer[..., self._idx - num_kept : self._idx, :]]
        free = mx.zeros((*new.shape[:2], num_free, new.shape[3]), new.dtype)
        return mx.concatenate([*parts, new, free], axis=2)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned last, for a layer that shares the cache of another."""
        assert self.keys is not None
        assert self.values is not None
        seen = slice(self._idx - self._num_seen, self._idx)
        return self.keys[..., seen, :], self.values[..., seen, :]

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """The mask of the next pass, of width N; None if each token sees all, as within a model's window."""
        if N > 1:
            return super().make_mask(N, window_size, return_array)
        num_seen = min(self.offset + 1, self.max_size)
        if window_size is None or num_seen <= window_size:
            return None
        return mx.arange(num_seen) >= num_seen - window_size

    @property
    def state(self) -> tuple[Any, ...]:
        """The state of a `RotatingKVCache` with the same tokens, of which any can be assigned. Later writes keep it."""
        if self.keys is None or self.values is None:
            return None, None, self.offset, self.keep, self.max_size, self._idx
        keys, values = self._temporal_order(self.keys), self._temporal_order(self.values)
        return keys, values, self.offset, self.keep, self.max_size, self._idx

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        ring = RotatingKVCache.from_state(state)
        self.offset, self.keep, self.max_size = ring.offset, ring.keep, ring.max_size
        self.keys = None if ring.keys is None else ring._temporal_order(ring.keys)
        self.values = None if ring.values is None else ring._temporal_order(ring.values)
        self._idx = 0 if self.keys is None else self.keys.shape[2]
        self._num_seen = min(self._idx, self.max_size)

    def _temporal_order(self, v: mx.array) -> mx.array:
        return v[..., : self._idx, :]
