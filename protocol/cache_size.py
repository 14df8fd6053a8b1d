"""The memory of cached texts: how many bytes the caches of texts of one model take at most, by their numbers of tokens.

A cache of full attention has a slot for each token; a sliding window has a bounded number of slots; a recurrent state
has one size. Texts that share passes are rows of one buffer, in which each has as many slots as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

# Slots that all rows of a batch together may have: this multiple of their tokens, or so many if that is more. A longer
# row than that leaves the batch; see `actors.mlx.shared_passes`.
MAX_PADDING, MAX_FREE_SLOTS = 2.0, 8192
# Prefix checkpoints of a text: most of them, and most bytes of them all, but this many whatever they take.
MAX_PREFIX_CHECKPOINTS, MAX_CHECKPOINT_BYTES, LEAST_PREFIX_CHECKPOINTS = 16, 1 << 28, 3
# Slots of texts that were read in one pass, and are not rows of that batch yet.
_JUST_READ_SLOTS = 4096


@attrs.frozen
class TextSize:
    """The size of one text."""

    num_tokens: int  # most tokens that are committed, prompt included
    widest_pass: int = 1  # most tokens of it that are read in one pass
    num_checkpoints: int = 0  # most recurrent states that are kept to go back to from a round
    keeps_prefixes: bool = False  # whether prefix checkpoints are kept, of recurrent states and windows


@attrs.frozen
class CacheSize:
    """The sizes of one model's caches, summed over its layers."""

    slot_bytes: int = 0  # of a slot of the caches that grow with a text
    # Of those that do not: the most slots, without those that a wide pass adds, and the bytes of a slot.
    windows: tuple[tuple[int, int], ...] = ()
    fixed_bytes: int = 0  # recurrent states of one text
    num_spare: int = 0  # slots beyond a text's tokens: buffers grow in steps, and drafted tokens come and go
    are_rows: bool = False  # whether texts may be rows of one buffer
    dense_slots: int = 0  # tokens up to which the growing caches are not quantised yet; 0 if they never are
    dense_slot_bytes: int = 0  # bytes of a slot until then

    def of(self, texts: Sequence[TextSize]) -> int:
        """The most bytes that texts of these sizes take at once, at any moment until they have grown to them."""
        if not texts:
            return 0
        num_bytes = sum(self._growing(text) + self.fixed_bytes * (1 + text.num_checkpoints) for text in texts)
        num_bytes += sum(self._prefixes(text) for text in texts if text.keeps_prefixes)
        rows = len(texts) if self.are_rows else 0
        longest = max(text.num_tokens for text in texts) + self.num_spare
        if rows > 1:
            num_tokens = sum(text.num_tokens for text in texts)
            fitting = int(max(MAX_FREE_SLOTS, MAX_PADDING * num_tokens)) + _JUST_READ_SLOTS + rows * self.num_spare
            own = num_tokens + rows * self.num_spare
            num_bytes += self.slot_bytes * max(0, min(rows * longest, fitting) - own)
        for most_slots, slot_bytes in self.windows:
            own = sum(self._window_slots(text, most_slots) for text in texts)
            num_bytes += slot_bytes * max(own, rows * min(longest, most_slots))
        return num_bytes

    def _window_slots(self, text: TextSize, most_slots: int) -> int:
        return min(text.num_tokens + self.num_spare, most_slots + text.widest_pass)

    def _prefixes(self, text: TextSize) -> int:
        windows = sum(slot_bytes * self._window_slots(text, most_slots) for most_slots, slot_bytes in self.windows)
        one = self.fixed_bytes + windows
        return max(min(MAX_PREFIX_CHECKPOINTS * one, MAX_CHECKPOINT_BYTES), LEAST_PREFIX_CHECKPOINTS * one)

    def _growing(self, text: TextSize) -> int:
        num_slots = text.num_tokens + self.num_spare
        if self.dense_slots == 0:
            return self.slot_bytes * num_slots
        num_dense = min(num_slots, self.dense_slots + text.widest_pass + self.num_spare)
        quantized = self.slot_bytes * num_slots if text.num_tokens >= self.dense_slots else 0
        return max(self.dense_slot_bytes * num_dense, quantized)
