"""A row pool: which texts of a model are rows of its batch, from pass to pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from actors.rows.row_text import RowText
from actors.rows.rows import Rows
from protocol.cache_size import MAX_FREE_SLOTS, MAX_PADDING

# A row leaves the batch once it has missed this many passes, each of which computed padding for it.
MAX_PASSES_MISSED = 4

T = TypeVar("T", bound=RowText)
R = TypeVar("R", bound=Rows)


class RowPool(Generic[T, R]):
    """The rows of one model.

    Attributes:
        batch: has the rows of the next pass.
        has_fed_rows: whether a pass since `begin_feed` had rows.
    """

    def __init__(self, new_batch: Callable[[T | None], R]) -> None:
        """Without rows yet; `new_batch` makes an empty batch, whose first row a text will be if one is given."""
        self._new_batch = new_batch
        self.batch = new_batch(None)
        self._rows: dict[T, int] = {}  # how many passes each has missed
        self.has_fed_rows = False

    def begin_feed(self) -> None:
        """Begin what `abandon` undoes."""
        self.has_fed_rows = False

    def joined(self, texts: Sequence[T], may_share: Callable[[T], bool]) -> list[T]:
        """Have those texts that can share the next pass join the batch. Returns: these texts, in order."""
        if len(texts) < 2 and not self._rows:
            return []
        rows = [text for text in texts if may_share(text)]
        too_long: set[T] = set()
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

    def _take_in(self, texts: Sequence[T]) -> None:
        """Make texts rows of the batch. Where all of a batch come, such as those that were read together, its rows are
        taken in at once: each row that moves by itself copies all others.
        """
        by_batch: dict[Rows | None, list[T]] = {}
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

    def offer(self, batch: R, texts: Sequence[T]) -> None:
        """Take a batch with other texts as the pool's, unless that has rows: then they join it when they next share a
        pass.
        """
        if not any(text.batch is self.batch for text in self._rows):
            self.batch, self._rows = batch, dict.fromkeys(texts, 0)

    def abandon(self) -> None:
        """Empty the caches of all rows, if a pass since `begin_feed` had any, since it may have left anything in
        them.
        """
        if not self.has_fed_rows:
            return
        for text in self._rows:
            if text.batch is self.batch:
                text.forget()
        self._rows = {}
        self.batch = self._new_batch(None)


def _fitting(lengths: Mapping[T, int]) -> set[T]:
    """The shortest of the texts, as many as can be rows without much more memory than they take alone."""
    fitting: set[T] = set()
    num_tokens = 0
    for text, length in sorted(lengths.items(), key=lambda each: each[1]):
        num_tokens += length
        num_slots = (len(fitting) + 1) * length
        if num_slots > max(MAX_FREE_SLOTS, MAX_PADDING * num_tokens):
            break
        fitting.add(text)
    return fitting
