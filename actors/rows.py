"""Texts as rows of shared caches: batches, the texts in them, and which texts are rows from pass to pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx

from actors.mlx.cache_kinds import kind_of, kinds_of
from actors.mlx.memory import release_buffers
from actors.mlx.row_caches import STEP, RowCache
from protocol.cache_size import MAX_FREE_SLOTS, MAX_PADDING
from protocol.errors import RewindError
from protocol.prefill_chunks import MAX_CHUNK_TOKENS

# A row leaves the batch once it has missed this many passes, each of which computed padding for it.
MAX_PASSES_MISSED = 4

T = TypeVar("T")


class Rows:
    """Several texts in the row caches of some layers. A row is named by a key that stays as others come and go."""

    def __init__(self, caches: Sequence[Any]) -> None:
        """Without rows yet; `caches` are those of one text, each of a kind that has a `row_cache`."""
        self._caches = [kind_of(layer).row_cache(layer) for layer in caches]
        row_caches: list[RowCache] = [rows for _, rows in kinds_of(self._caches)]
        self._row_caches = row_caches  # without the lists that some of them are in
        self.is_recurrent = any(rows.is_recurrent for rows in row_caches)
        self.rewinds_passes = all(rows.keeps_all for rows in row_caches)  # whether a row can go back to any length
        self.widest_row = min((rows.max_width for rows in row_caches), default=MAX_CHUNK_TOKENS)
        self.pads_texts = any(rows.keeps_all for rows in row_caches)  # whether each row takes as much as the longest
        self.keys: list[object] = []  # of the rows, in order
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

        `forward` computes it with the given caches, over as many tokens of each row in `keys` as of the widest; what is
        beyond a row's own is padding. Returns: what `forward` returns.
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

    def features(self, key: object) -> mx.array | None:
        """(tokens, width) features of a row's part in the last pass, lazy; None if they are not recorded."""
        return None

    @property
    def state(self) -> list[Any]:
        """The arrays of all rows, to be evaluated."""
        return [rows.state for rows in self._row_caches]

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(int(rows.nbytes) for rows in self._row_caches)


class RowText(ABC):
    """A text that can become a row, and leave again."""

    def __init__(self, cache: Sequence[Any]) -> None:
        """An empty text."""
        self.cache = list(cache)  # its own caches, one for each layer
        self.batch: Rows | None = None  # the rows of which it is one. Then `cache` holds nothing of it.
        self._length = 0

    @property
    def is_row(self) -> bool:
        """Whether it is a row of a batch."""
        return self.batch is not None

    @property
    def can_be_row(self) -> bool:
        """Whether the text can be a row: it is not empty, and its caches can be rewound in a batch as well as here."""
        return self._length > 0 and all(kind.can_be_row and not layer.empty() for kind, layer in kinds_of(self.cache))

    @property
    def length(self) -> int:
        """Number of tokens in the caches."""
        return self._length

    def join(self, batch: Rows) -> None:
        """Become a row of a batch. `can_be_row` must be true, or the text empty."""
        self.leave_batch()
        self.check_caches(self._length)
        batch.join(self, self.cache, self._length)
        self.batch = batch

    def follow_into(self, batch: Rows) -> None:
        """Be a row of a batch that has absorbed the one in which the text was."""
        self.batch = batch
        self.check_caches(self._length)

    def leave_batch(self) -> None:
        """If the text is a row, take it back into caches of its own."""
        if self.batch is not None:
            self._length = self.batch.leave(self, self.cache)
            self.batch = None
            try:
                # Until they are evaluated, these slices keep the buffers of the whole batch in memory.
                mx.eval([layer.state for layer in self.cache])
            except BaseException:
                # The job may be another text's, as when this one has missed many passes. Its cache is lost.
                self.forget()
                raise
            self.check_caches(self._length)

    @abstractmethod
    def forget(self) -> None:
        """Drop all tokens. Also leaves its batch, if it is a row."""

    def count_row(self) -> None:
        """Count the tokens that the batch has fed."""
        assert self.batch is not None
        self._length = self.batch.length(self)

    def check_caches(self, length: int) -> None:
        """Raises: RewindError: some layer's cache holds another number of tokens than `length`."""
        if self.batch is not None:
            if self.batch.length(self) != length:
                raise RewindError(f"a row should hold {length} tokens, it holds {self.batch.length(self)}")
            return
        for i, layer in enumerate(self.cache):
            for kind, inner in kinds_of((layer,)):
                if (inner_length := kind.length(inner)) not in (length, None):
                    raise RewindError(
                        f"layer {i} ({type(inner).__name__}) should hold {length} tokens, it holds {inner_length}"
                    )


X = TypeVar("X", bound=RowText)
R = TypeVar("R", bound=Rows)


class RowPool(Generic[X, R]):
    """The rows of one model."""

    def __init__(self, new_batch: Callable[[X | None], R]) -> None:
        """Without rows yet; `new_batch` makes an empty batch, whose first row a text will be if one is given."""
        self._new_batch = new_batch
        self.batch = new_batch(None)  # has the rows of the next pass
        self._rows: dict[X, int] = {}  # how many passes each has missed
        self.has_fed_rows = False

    def begin_feed(self) -> None:
        """Begin what `abandon` undoes."""
        self.has_fed_rows = False

    def joined(self, texts: Sequence[X], may_share: Callable[[X], bool]) -> list[X]:
        """Have those texts that can share the next pass join the batch. Returns: these texts, in order."""
        if len(texts) < 2 and not self._rows:
            return []
        rows = [text for text in texts if may_share(text)]
        too_long: set[X] = set()
        if self.batch.pads_texts:
            others = [text for text in self._rows if text.batch is self.batch]
            fitting = _fitting({text: text.length for text in (*others, *rows)})
            rows = [text for text in rows if text in fitting]
            too_long = {text for text in others if text not in fitting}
        if len(rows) < 2:
            # A single text stays a row while there are others, which may be fed again in the next pass.
            rows = [text for text in rows if text in self._rows and len(self._rows) > 1]
        if not rows:
            return []
        self.has_fed_rows = True
        self._rows = {text: missed + 1 for text, missed in self._rows.items() if text.batch is self.batch}
        for text, missed in list(self._rows.items()):
            if text in too_long or (text not in rows and missed > MAX_PASSES_MISSED):
                text.leave_batch()
                del self._rows[text]
        if not self._rows:
            self.batch = self._new_batch(rows[0])
        self._take_in([text for text in rows if text not in self._rows])
        self._rows |= dict.fromkeys(rows, 0)
        return rows

    def _take_in(self, texts: Sequence[X]) -> None:
        """Make texts rows of the batch; all rows of another batch at once, since each move copies all rows."""
        by_batch: dict[Rows | None, list[X]] = {}
        for text in texts:
            by_batch.setdefault(text.batch, []).append(text)
        for batch, group in by_batch.items():
            if batch is not None and len(batch) == len(group):
                self.batch.absorb(batch)
                for text in group:
                    text.follow_into(self.batch)
            else:
                for text in group:
                    text.join(self.batch)

    def offer(self, batch: R, texts: Sequence[X]) -> None:
        """Take a batch with other texts as the pool's, unless that has rows, which they may join later."""
        if not any(text.batch is self.batch for text in self._rows):
            self.batch, self._rows = batch, dict.fromkeys(texts, 0)

    def abandon(self) -> None:
        """Empty the caches of all rows, if a pass since `begin_feed` had any: it may have left anything there."""
        if not self.has_fed_rows:
            return
        for text in self._rows:
            if text.batch is self.batch:
                text.forget()
        self._rows = {}
        self.batch = self._new_batch(None)


def _fitting(lengths: Mapping[X, int]) -> set[X]:
    """The shortest of the texts, as many as can be rows without much more memory than they take alone."""
    fitting: set[X] = set()
    num_tokens = 0
    for text, length in sorted(lengths.items(), key=lambda each: each[1]):
        num_tokens += length
        num_slots = (len(fitting) + 1) * length
        if num_slots > max(MAX_FREE_SLOTS, MAX_PADDING * num_tokens):
            break
        fitting.add(text)
    return fitting
