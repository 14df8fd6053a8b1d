"""A text in caches of its own, or in a row of shared ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from actors.mlx.cache_kinds import kinds_of
from actors.rows.rows import Rows
from protocol.errors import RewindError


class RowText(ABC):
    """A text that can become a row, and leave again.

    Attributes:
        cache: its own caches, one for each layer.
        batch: the rows of which it is one. Then `cache` holds nothing of it.
    """

    def __init__(self, cache: Sequence[Any]) -> None:
        """An empty text."""
        self.cache = list(cache)
        self.batch: Rows | None = None
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
        """Raises: RewindError: some layer's cache does not hold `length` tokens, those included that no session has
        fed.
        """
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
