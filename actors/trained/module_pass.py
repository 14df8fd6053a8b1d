"""The pass of a module: a part of a drafter that reads hidden states and tokens of a text, position by position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx

from actors.mlx.row_caches import MAX_WIDTH
from actors.rows import RowPool, Rows, RowText
from actors.trained.shared_reading import SharedPass
from actors.trained.trained_sequence import DrafterReader, copied_layers


class FeatureReader(DrafterReader, Protocol):
    """The forward pass of a module."""

    def project(self, features: mx.array) -> mx.array:
        """(n, features) → (n, hidden size): the hidden states that stand for features; lazy."""

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process tokens of B texts, after those in the caches, which may be `RowCache`s.

        Args:
            hidden: (B, n, hidden size), of the positions before the (B, n) tokens.

        Returns: (B, n, hidden size) hidden states, which stand for the features of the tokens' positions, and (B, n, V)
            logits; lazy.
        """


class ModuleText(RowText):
    """What one module has read of a text."""

    def __init__(self, make_cache: Callable[[], list[Any]], lose: Callable[[], None]) -> None:
        """An empty one; `lose` is called if what it has read is lost."""
        super().__init__(make_cache())
        self._make_cache, self._lose = make_cache, lose

    def forget(self) -> None:
        self._lose()

    def clear(self) -> None:
        """Drop all."""
        self.fill(self._make_cache(), 0)

    def close(self) -> None:
        self.fill([], 0)

    def fill(self, cache: list[Any], length: int) -> None:
        """Take caches with `length` positions in place of what there is."""
        if self.batch is not None:
            self.batch.drop(self)
        self.batch, self.cache, self._length = None, cache, length

    def copy(self, lose: Callable[[], None]) -> ModuleText:
        """Another one with the same positions."""
        other = ModuleText(self._make_cache, lose)
        if self.batch is None:
            other.cache = copied_layers(self.cache)
        else:
            self.batch.copy_to(self, other.cache)
        other._length = self._length
        return other

    def cut(self, length: int) -> None:
        """Drop all but the first `length` positions, if there are more."""
        if (num_dropped := self._length - length) <= 0:
            return
        self._length = length
        if self.batch is not None:
            self.batch.rewind(self, length)
        for layer in self.cache if self.batch is None else ():
            layer.trim(num_dropped)

    def count(self, num_read: int) -> None:
        """Count positions that were read into its own caches."""
        self._length += num_read

    @property
    def arrays(self) -> list[Any]:
        """Its own, to be evaluated."""
        return [] if self.is_row else [layer.state for layer in self.cache if not layer.empty()]


@attrs.frozen(eq=False)
class ModulePart:
    """A text's part in a module's pass."""

    text: ModuleText
    hidden: mx.array  # (n, hidden size), of the positions before the tokens
    tokens: list[int]  # n ids
    num_masks: int = 0  # how many of these, at the end, leave nothing in the caches


class ModulePass(SharedPass[ModulePart]):
    """The pass of a module. A part's result is its hidden states, (n, hidden size), and logits, (n, V)."""

    @staticmethod
    def each(readers: Iterable[FeatureReader]) -> list[ModulePass]:
        """The passes of modules, the first of which predicts the next token."""
        return [ModulePass(reader, depth) for depth, reader in enumerate(readers)]

    def __init__(self, reader: FeatureReader, depth: int) -> None:
        self.reader, self.depth = reader, depth
        self._pool = RowPool[ModuleText, Rows](lambda _: Rows(reader.make_cache()))

    def alone(self, part: ModulePart) -> tuple[mx.array, mx.array]:
        text = part.text
        text.leave_batch()
        hidden, logits = self.reader.read(part.hidden[None], mx.array([part.tokens]), text.cache)
        text.count(len(part.tokens))
        text.cut(text.length - part.num_masks)
        return hidden[0], logits[0]

    def together(self, parts: Sequence[ModulePart]) -> list[tuple[mx.array, mx.array]]:
        by_text = {part.text: part for part in parts}
        narrow = [part.text for part in parts if len(part.tokens) <= MAX_WIDTH]
        rows = self._pool.joined(narrow, lambda text: text.is_row or text.can_be_row)
        of_rows = self._of_rows({text: by_text[text] for text in rows}) if rows else {}
        return [of_rows[part.text] if part.text in of_rows else self.alone(part) for part in parts]

    def _of_rows(self, parts: Mapping[ModuleText, ModulePart]) -> dict[ModuleText, tuple[mx.array, mx.array]]:
        batch = self._pool.batch
        widths: dict[object, int] = {text: len(part.tokens) for text, part in parts.items()}
        width = max(widths.values())
        any_hidden = next(iter(parts.values())).hidden
        nothing = mx.zeros((width, any_hidden.shape[1]), any_hidden.dtype)
        by_key: Mapping[Any, ModulePart] = parts
        hidden = mx.stack([_padded(by_key[key].hidden, width) if key in by_key else nothing for key in batch.keys])
        of_rows = [by_key[key].tokens if key in by_key else [] for key in batch.keys]
        tokens = mx.array([row + [0] * (width - len(row)) for row in of_rows])
        given, logits = batch.run(widths, lambda caches: self.reader.read(hidden, tokens, caches))
        found = {}
        for row, key in enumerate(batch.keys):
            if (part := by_key.get(key)) is not None:
                part.text.count_row()
                part.text.cut(part.text.length - part.num_masks)
                found[part.text] = given[row, : len(part.tokens)], logits[row, : len(part.tokens)]
        return found

    def begin_feed(self) -> None:
        self._pool.begin_feed()

    def abandon(self) -> None:
        self._pool.abandon()


def _padded(hidden: mx.array, width: int) -> mx.array:
    missing = width - hidden.shape[0]
    return mx.pad(hidden, [(0, missing), (0, 0)]) if missing else hidden
