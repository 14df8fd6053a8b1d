"""One text of a drafter that reads features position by position.

*Position* i of such a drafter reads the features of position i and the token at position i + 1. At depth 0 it predicts
the token at position i + 2. Later tokens are predicted from the same features, in one of two ways:

* A *module* for each depth: module k reads the output of module k - 1 at position i and the token at position
  i + 1 + k, and predicts the token after that. Each has caches of its own, and reads the positions that it lacks when
  something is drafted at its depth. Beyond the last depth, the last module goes on with its own hidden states; those
  positions are read again, in one pass, once the features come.
* Further rows of logits from the pass at depth 0, which do not depend on the tokens between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import attrs
import mlx.core as mx

from actors.mlx.cache_kinds import MisfitError
from actors.mlx.row_caches import MAX_WIDTH
from actors.mlx.sequence_state import SequenceState
from actors.rows import RowPool, Rows, RowText
from actors.trained.positioned_rows import PositionedRows
from actors.trained.shared_reading import ReadingPart, SharedPass, SharedReading, read_alone
from actors.trained.trained_sequence import (
    DrafterReader,
    TrainedSequence,
    check_features,
    check_state,
    copied_layers,
    put_layers,
    taken_layers,
)
from protocol.messages import Features
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS

# Most positions that are read in one pass: if none of their logits are wanted, and if some are.
MAX_READ, MAX_READ_WITH_LOGITS = 512, 64


class FeatureReader(DrafterReader, Protocol):
    """The forward pass of a module."""

    def project(self, features: mx.array) -> mx.array:
        """(n, features) → (n, hidden size): the hidden states that stand for features; lazy."""

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process (B, n) tokens after those in the caches, which may be `RowCache`s; `hidden`, (B, n, width), is that
        of the positions before. Returns: hidden states for the next positions, and (B, n, V) logits; lazy.
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

    def _of_rows(self, parts: Mapping[Any, ModulePart]) -> dict[ModuleText, tuple[mx.array, mx.array]]:
        batch = self._pool.batch
        widths = {text: len(part.tokens) for text, part in parts.items()}
        width, nothing = max(widths.values()), next(iter(parts.values())).hidden[:0]
        of_rows = [parts.get(key) for key in batch.keys]
        read = [(nothing, []) if part is None else (part.hidden, part.tokens) for part in of_rows]
        hidden = mx.stack([mx.pad(states, [(0, width - states.shape[0]), (0, 0)]) for states, _ in read])
        tokens = mx.array([ids + [0] * (width - len(ids)) for _, ids in read])
        given, logits = batch.run(widths, lambda caches: self.reader.read(hidden, tokens, caches))
        found = {}
        for row, part in enumerate(of_rows):
            if part is not None:
                part.text.count_row()
                part.text.cut(part.text.length - part.num_masks)
                found[part.text] = given[row, : len(part.tokens)], logits[row, : len(part.tokens)]
        return found

    def begin_feed(self) -> None:
        self._pool.begin_feed()

    def abandon(self) -> None:
        self._pool.abandon()


@attrs.frozen
class Masks:
    """What a module reads after the tokens of a text, for the depths from 1 on. It leaves nothing in the caches."""

    num_masks: int  # >= 1; that many depths more
    token: int  # the target's id for each
    hidden: Callable[[], mx.array]  # returns (1, hidden size), which each has for its hidden state; lazy


class DepthSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, passes: Sequence[ModulePass], masks: Masks | None = None) -> None:
        """Make an empty sequence, with the pass of each module, that of depth 0 first; with masks, there is one."""
        readers = [each.reader for each in passes]
        super().__init__(readers[0].feature_width)
        self._passes, self._first, self._masks = passes, readers[0], masks
        self._num_parallel = 0 if masks is None else masks.num_masks
        # What each module has read: the positions from `_begin` on.
        self._begin = 0
        self._texts = [ModuleText(reader.make_cache, self.forget) for reader in readers]
        # What each module reads besides tokens (the first, projected features), and then the last module's output.
        self._hidden = [PositionedRows() for _ in range(len(passes) + 1)]
        self._parallel = mx.zeros((self._num_parallel, self._first.vocab_size))

    @property
    def foreseen(self) -> int | None:
        return self.num_given + 2 + self._num_parallel if self._num_parallel else None

    @property
    def is_row(self) -> bool:
        return any(text.is_row for text in self._texts)

    def rewind(self, length: int) -> int:
        super().rewind(length)
        for module in range(len(self._texts)):
            self._cut(module, length - 1 - module)
            self._hidden[module + 1].drop_from(max(0, length - 1 - module))
        return length

    def check(self, length: int) -> None:
        super().check(length)
        for text in self._texts:
            text.check_caches(text.length)

    def forget(self) -> None:
        super().forget()
        self._restart()

    def close(self) -> None:
        super().close()
        for text in self._texts:
            text.close()
        for rows in self._hidden:
            rows.clear()

    @property
    def num_bytes(self) -> int:
        layers = sum(int(layer.nbytes) for layer in self._own_caches())
        return layers + sum(rows.num_bytes for rows in self._hidden)

    def _copy_caches(self) -> None:
        self._texts = [text.copy(self.forget) for text in self._texts]
        self._hidden = [rows.copy() for rows in self._hidden]

    def _own_caches(self) -> list[Any]:
        """The caches of all modules, none of which has its text in a row then."""
        for text in self._texts:
            text.leave_batch()
        return [layer for text in self._texts for layer in text.cache]

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        """0 if a module would have to read positions again whose features are missing."""
        length, first = super().reusable_length(num_common, num_read), self._hidden[0].begin
        return 0 if self._begin < first and length - len(self._texts) < first else length

    def reuse(self, length: int) -> None:
        """Drops the features of what the texts do not share, which were the other text's."""
        super().reuse(length)
        self._hidden[0].drop_from(self._num_common)
        self._cut(-1, self._num_known)
        self.num_given = self._num_known

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if features are missing. The last positions are left out, whose outputs the next module reads."""
        self._look_at_arrived()
        read_alone(self._read_text())
        features = self._hidden[0]
        # The last position with features is read again: its output stands for the features that are missing after it.
        num_rows = min(self._num_known - 1, len(tokens) - len(self._texts))
        if self._begin > 0 or not features.pieces or num_rows < max(1, features.begin):
            return None
        layers = taken_layers(self._own_caches(), num_rows)
        return SequenceState(
            tokens, layers, features=Features(features.begin, features.between(features.begin, features.end))
        )

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=len(self._own_caches()), has_features=True)
        features, num_tokens = state.features, len(state.tokens)
        assert features is not None
        check_features(features, self._first.project(mx.zeros((1, self.feature_width))))
        layers, num_rows = put_layers(state, self._grown)
        end = features.start + features.values.shape[0]
        if not features.start <= num_rows < end or num_rows > num_tokens - len(self._texts):
            raise MisfitError(
                f"it has {num_rows} positions, and features from {features.start} to {end}, of {num_tokens} tokens"
            )
        rest = iter(layers)
        for text in self._texts:
            text.fill([*islice(rest, len(text.cache))], num_rows)
        self._tokens, self.num_given = [*state.tokens], end
        self._hidden[0].add(features.start, features.values)

    def _grown(self, num_rows: int) -> list[Any]:
        layers = []
        hidden = self._first.project(mx.zeros((num_rows, self.feature_width)))[None]
        for each in self._passes:
            layers += (cache := each.reader.make_cache())
            hidden, _ = each.reader.read(hidden, mx.zeros((1, num_rows), mx.int32), cache)
        return layers

    @property
    def _num_known(self) -> int:
        return self._hidden[0].end

    def _restart(self) -> None:
        self._begin = self._hidden[0].begin
        for text in self._texts:
            text.clear()
        for rows in self._hidden[1:]:
            rows.clear()

    def _cut(self, module: int, end: int) -> None:
        """Have a module forget the positions from `end` on."""
        self._texts[module].cut(max(0, end - self._begin))

    def _look_at(self, start: int, features: mx.array) -> None:
        # What was read at positions without features is read again.
        self._cut(-1, self._num_known)
        # Some may come a second time, if the target has lost its cache.
        known = max(0, self._num_known - start) if self._hidden[0].pieces else 0
        if known < features.shape[0]:
            begin = self._hidden[0].begin
            self._hidden[0].add(start + known, self._first.project(features[known:]))
            if self._hidden[0].begin != begin:
                self._restart()
            self._hidden[-1].drop_before(self._num_known - 1)
            # Also those of earlier rounds, in which nothing was drafted that reads them.
            mx.eval([piece for rows in self._hidden for piece in rows.pieces[-1:]])

    def _read_text(self) -> SharedReading[None]:
        for module in range(len(self._texts)):
            yield from self._advance(module, min(self._num_known, len(self._tokens) - 1 - module))
        mx.eval([text.arrays for text in self._texts])

    def _logits(self, position: int) -> SharedReading[mx.array]:
        depth, logits = position - self._num_known, None
        if self._begin < position and self._begin < self._num_known:
            if depth <= 0:
                end = min(len(self._tokens) - 1, self._num_known)
                logits = yield from self._advance(0, end, end + 1 - position)
            elif self._num_parallel:
                yield from self._advance(0, self._num_known)
                logits = self._parallel[depth - 1 : depth] if depth <= self._num_parallel else None
            else:
                module = min(depth, len(self._texts) - 1)
                logits = yield from self._advance(module, position - module)
        return mx.zeros((1, self._first.vocab_size)) if logits is None else logits

    def _advance(self, module: int, end: int, num_rows: int = 1) -> SharedReading[mx.array | None]:
        """Have a module read the positions before `end`. Returns: the last rows of logits; None if nothing was read."""
        rows: mx.array | None = None
        while (begin := self._begin + self._texts[module].length) < end:
            if module > 0:
                given_before = self._hidden[module]
                if not given_before.pieces or begin < given_before.begin:
                    # Its input was left out when the state was taken.
                    self._cut(module - 1, begin)
                yield from self._advance(module - 1, min(end, self._num_known))
            is_last_pass = end - begin <= MAX_READ_WITH_LOGITS + num_rows
            hidden = self._entering(module, begin, end if is_last_pass else min(begin + MAX_READ, end - num_rows))
            given, logits = yield self._part(module, begin + 1 + module, hidden)
            num_read = hidden.shape[0]
            self._hidden[module + 1].drop_from(begin)
            self._hidden[module + 1].add(begin, given[:num_read])
            self._parallel = logits[num_read:]
            rows = logits[:num_read]
            if not is_last_pass:
                mx.eval(given, self._texts[module].arrays)
        return None if rows is None else rows[-num_rows:]

    def _part(self, module: int, first_token: int, hidden: mx.array) -> ReadingPart[ModulePart]:
        """A module's pass over hidden states, with the tokens from a position on."""
        tokens = self._tokens[first_token : first_token + hidden.shape[0]]
        if (masks := self._masks) is not None:
            masked = masks.hidden().astype(hidden.dtype)
            hidden = mx.concatenate([hidden, mx.repeat(masked, masks.num_masks, axis=0)])
            tokens += [masks.token] * masks.num_masks
        return ReadingPart(self._passes[module], ModulePart(self._texts[module], hidden, tokens, self._num_parallel))

    def _entering(self, module: int, begin: int, end: int) -> mx.array:
        """The hidden states that a module reads at some positions: those that are known, at least one."""
        fresh, own = self._hidden[module], self._hidden[module + 1]
        parts = []
        if begin < fresh.end:
            parts.append(fresh.between(begin, min(end, fresh.end)))
        # The hidden state that the last module gave at a position stands for the unknown one at the next.
        begin = max(begin, fresh.end)
        if begin < (end := min(end, own.end + 1)):
            parts.append(own.between(begin - 1, end - 1))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)
