"""Rows of shared caches: several texts, which join, are read in passes that all share, are rewound, and leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from actors.mlx.cache_kinds import kind_of, kinds_of
from actors.mlx.memory import release_buffers
from actors.mlx.row_caches import STEP, RowCache
from protocol.errors import RewindError
from protocol.prefill_chunks import MAX_CHUNK_TOKENS

T = TypeVar("T")


class Rows:
    """Several texts in the row caches of some layers. A row is named by a key that stays while other rows come and go.

    Attributes:
        keys: of the rows, in order.
        is_recurrent: whether a row can only go back to where it was before its last pass.
        rewinds_passes: whether a row can go back to any length, and not just to one within its last pass.
        widest_row: most tokens of one row in a pass.
        pads_texts: whether each row takes as much memory as the longest.
    """

    def __init__(self, caches: Sequence[Any]) -> None:
        """Without rows yet; `caches` are those of one text, each of a kind that has a `row_cache`."""
        self._caches = [kind_of(layer).row_cache(layer) for layer in caches]
        row_caches: list[RowCache] = [rows for _, rows in kinds_of(self._caches)]
        self._row_caches = row_caches  # without the lists that some of them are in
        self.is_recurrent = any(rows.is_recurrent for rows in row_caches)
        self.rewinds_passes = all(rows.rewinds_passes for rows in row_caches)
        self.widest_row = min((rows.max_width for rows in row_caches), default=MAX_CHUNK_TOKENS)
        self.pads_texts = any(rows.is_padded for rows in row_caches)
        self.keys: list[object] = []
        self._row_of: dict[object, int] = {}  # by key: its index
        self._lengths: list[int] = []
        # Lengths before the last pass, from which recurrent states are kept, and which rows are to go back there.
        self._lengths_before: list[int] = []
        self._goes_back: list[bool] = []

    def __len__(self) -> int:
        return len(self.keys)

    def length(self, key: object) -> int:
        return self._lengths[self._row_of[key]]

    def join(self, key: object, caches: Sequence[Any], length: int) -> None:
        """Add a row with the text of one text's caches, which give it up."""
        self._settle()
        for rows, (_, single) in zip(self._row_caches, kinds_of(caches), strict=True):
            rows.join(single, length)
        self._append_row(key, length)

    def absorb(self, other: Rows) -> None:
        """Take in all rows of another batch of the model, which gives them up. That copies each of them once."""
        self._settle()
        other._settle()
        for rows, others in zip(self._row_caches, other._row_caches, strict=True):
            rows.absorb(others)
        for key, length in zip(other.keys, other._lengths, strict=True):
            self._append_row(key, length)
        other.keys, other._row_of, other._lengths, other._lengths_before, other._goes_back = [], {}, [], [], []

    def _append_row(self, key: object, length: int) -> None:
        self._row_of[key] = len(self.keys)
        self.keys.append(key)
        self._lengths.append(length)
        self._lengths_before.append(length)
        self._goes_back.append(False)

    def leave(self, key: object, caches: Sequence[Any]) -> int:
        """Remove a row, and give its text back to the caches that joined. Returns: its tokens."""
        length = self.copy_to(key, caches)
        self.drop(key)
        return length

    def copy_to(self, key: object, caches: Sequence[Any]) -> int:
        """Give the text of a row to caches of one text, which may have joined or be empty. Returns: its tokens."""
        self._settle()
        row = self._row_of[key]
        length = self._lengths[row]
        for rows, (_, single) in zip(self._row_caches, kinds_of(caches), strict=True):
            rows.copy_to(row, length, single)
        return length

    def drop(self, key: object) -> None:
        """Remove a row and its text."""
        self._settle()
        row = self._row_of[key]
        longest = max((length for other, length in enumerate(self._lengths) if other != row), default=0)
        for rows in self._row_caches:
            rows.shrink(longest)
            rows.remove(row)
        for column in (self.keys, self._lengths, self._lengths_before, self._goes_back):
            del column[row]
        self._row_of = {other: index for index, other in enumerate(self.keys)}

    def run(self, widths: Mapping[object, int], forward: Callable[[list[Any]], T]) -> T:
        """Run a pass that reads tokens of some rows: by key how many, >= 0, at most `widest_row`.

        Args:
            forward: computes the pass of the given caches, over as many tokens of each row in `keys` as of the widest;
                what is beyond a row's own is padding.

        Returns: what `forward` returns.
        """
        self._settle()
        read = [widths.get(key, 0) for key in self.keys]
        width = max(read)
        assert 0 < width <= self.widest_row
        for rows in self._row_caches:
            rows.begin(self._lengths, read)
        result = forward(self._caches)
        if max(self._lengths) // STEP != (max(self._lengths) + width) // STEP:
            release_buffers()
        self._lengths_before = list(self._lengths)
        self._lengths = [length + tokens for length, tokens in zip(self._lengths, read, strict=True)]
        return result

    def rewind(self, key: object, length: int) -> int:
        """Drop a row's tokens until at most the first `length` are left. See `CachedSequence.rewind`."""
        row = self._row_of[key]
        if length > self._lengths[row]:
            raise RewindError(f"asked to rewind to {length} tokens a row that holds {self._lengths[row]}")
        if length < self._lengths[row]:
            if not self.is_recurrent:
                self._lengths[row] = length
            elif length >= self._lengths_before[row]:
                self._lengths[row], self._goes_back[row] = self._lengths_before[row], True
            else:
                raise RewindError(
                    f"asked to rewind to {length} tokens a row that can only go back to {self._lengths_before[row]}"
                )
        return self._lengths[row]

    def _settle(self) -> None:
        """Restore the recurrent states of the rows that were rewound."""
        if any(self._goes_back):
            for rows in self._row_caches:
                rows.restore(self._goes_back)
            self._goes_back = [False] * len(self)

    @property
    def state(self) -> list[Any]:
        """The arrays of all rows, to be evaluated."""
        return [rows.state for rows in self._row_caches]

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(int(rows.nbytes) for rows in self._row_caches)
