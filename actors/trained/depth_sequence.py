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

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import mlx.core as mx

from actors.mlx.cache_kinds import MisfitError
from actors.mlx.sequence_state import SequenceState
from actors.trained.positioned_rows import PositionedRows
from actors.trained.trained_sequence import (
    DrafterReader,
    TrainedSequence,
    check_features,
    check_state,
    copied_layers,
    put_layers,
    taken_layers,
)
from protocol.errors import RewindError
from protocol.messages import Features
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS

# Most positions that are read in one pass: if none of their logits are wanted, and if some are.
MAX_READ, MAX_READ_WITH_LOGITS = 512, 64


class FeatureReader(DrafterReader, Protocol):
    """The forward pass of a module."""

    def project(self, features: mx.array) -> mx.array:
        """(n, features) → (n, hidden size): the hidden states that stand for features; lazy."""

    def read(self, hidden: mx.array, tokens: mx.array, cache: list[Any]) -> tuple[mx.array, mx.array]:
        """Process tokens after the cached ones.

        Args:
            hidden: (n, hidden size), of the positions before the (n,) tokens.

        Returns: (n, hidden size) hidden states, which stand for the features of the tokens' positions, and (n, V)
            logits, and further ones for the depths from 1 on; lazy.
        """


class DepthSequence(TrainedSequence):
    """See `TrainedSequence`."""

    def __init__(self, modules: Sequence[FeatureReader], num_parallel: int = 0) -> None:
        """Make an empty sequence. `num_parallel` is how many more rows of logits a pass of the only module gives, for
        the depths from 1 on; 0 with a module for each depth, that of depth 0 first.
        """
        super().__init__(modules[0].feature_width)
        self._modules, self._num_parallel = modules, num_parallel
        self._caches = [module.make_cache() for module in modules]
        # What each module has read: the positions from `_begin` to its end.
        self._begin = 0
        self._ends = [0] * len(modules)
        # What each module reads besides tokens (the first, projected features), and then the last module's output.
        self._hidden = [PositionedRows() for _ in range(len(modules) + 1)]
        self._parallel = mx.zeros((num_parallel, modules[0].vocab_size))

    @property
    def foreseen(self) -> int | None:
        return self.num_given + 2 + self._num_parallel if self._num_parallel else None

    def rewind(self, length: int) -> int:
        super().rewind(length)
        for module in range(len(self._modules)):
            self._cut(module, length - 1 - module)
            self._hidden[module + 1].drop_from(max(0, length - 1 - module))
        return length

    def check(self, length: int) -> None:
        super().check(length)
        for cache, end in zip(self._caches, self._ends, strict=True):
            if any(layer.offset != end - self._begin for layer in cache):
                raise RewindError(f"a layer should hold {end - self._begin} positions, it holds {cache[0].offset}")

    def forget(self) -> None:
        super().forget()
        self._restart()

    def close(self) -> None:
        super().close()
        self._caches = []
        for rows in self._hidden:
            rows.clear()

    @property
    def num_bytes(self) -> int:
        layers = sum(int(layer.nbytes) for cache in self._caches for layer in cache)
        return layers + sum(rows.num_bytes for rows in self._hidden)

    def _copy_caches(self) -> None:
        self._caches = [copied_layers(cache) for cache in self._caches]
        self._hidden = [rows.copy() for rows in self._hidden]

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        """0 if a module would have to read positions again whose features are missing."""
        length, first = super().reusable_length(num_common, num_read), self._hidden[0].begin
        return 0 if self._begin < first and length - len(self._modules) < first else length

    def reuse(self, length: int) -> None:
        """Drops the features of what the texts do not share, which were the other text's."""
        super().reuse(length)
        self._hidden[0].drop_from(self._num_common)
        self._cut(-1, self._num_known)
        self.num_given = self._num_known

    def take_state(self, tokens: tuple[int, ...]) -> SequenceState | None:
        """None also if features are missing. The last positions are left out: they are read again, since their outputs
        are what the next module reads.
        """
        self._look_at_arrived()
        self._read_text()
        features = self._hidden[0]
        # The last position with features is read again: its output stands for the features that are missing after it.
        num_rows = min(self._num_known - 1, len(tokens) - len(self._modules))
        if self._begin > 0 or not features.pieces or num_rows < max(1, features.begin):
            return None
        layers = taken_layers([layer for cache in self._caches for layer in cache], num_rows)
        return SequenceState(
            tokens, layers, features=Features(features.begin, features.between(features.begin, features.end))
        )

    def put_state(self, state: SequenceState) -> None:
        check_state(state, num_layers=sum(len(cache) for cache in self._caches), has_features=True)
        features, num_tokens = state.features, len(state.tokens)
        assert features is not None
        check_features(features, self._modules[0].project(mx.zeros((1, self._feature_width))))
        layers, num_rows = put_layers(state, self._grown)
        end = features.start + features.values.shape[0]
        if not features.start <= num_rows < end or num_rows > num_tokens - len(self._modules):
            raise MisfitError(
                f"it has {num_rows} positions, and features from {features.start} to {end}, of {num_tokens} tokens"
            )
        rest = iter(layers)
        self._caches = [[*islice(rest, len(cache))] for cache in self._caches]
        self._ends = [num_rows] * len(self._modules)
        self._tokens, self.num_given = [*state.tokens], end
        self._hidden[0].add(features.start, features.values)

    def _grown(self, num_rows: int) -> list[Any]:
        layers = []
        hidden = self._modules[0].project(mx.zeros((num_rows, self._feature_width)))
        for module in self._modules:
            layers += (cache := module.make_cache())
            hidden, _ = module.read(hidden, mx.zeros(num_rows, mx.int32), cache)
        return layers

    # --- reading ----------------------------------------------------------------------------------

    @property
    def _num_known(self) -> int:
        return self._hidden[0].end

    def _restart(self) -> None:
        self._caches, self._begin = [module.make_cache() for module in self._modules], self._hidden[0].begin
        self._ends = [self._begin] * len(self._modules)
        for rows in self._hidden[1:]:
            rows.clear()

    def _cut(self, module: int, end: int) -> None:
        """Have a module forget the positions from `end` on."""
        end = max(self._begin, end)
        if (num_dropped := self._ends[module] - end) > 0:
            for layer in self._caches[module]:
                layer.trim(num_dropped)
            self._ends[module] = end

    def _look_at(self, start: int, features: mx.array) -> None:
        # What was read at positions without features is read again.
        self._cut(-1, self._num_known)
        # Some may come a second time, if the target has lost its cache.
        known = max(0, self._num_known - start) if self._hidden[0].pieces else 0
        if known < features.shape[0]:
            begin = self._hidden[0].begin
            self._hidden[0].add(start + known, self._modules[0].project(features[known:]))
            if self._hidden[0].begin != begin:
                self._restart()
            self._hidden[-1].drop_before(self._num_known - 1)
            # Also those of earlier rounds, in which nothing was drafted that reads them.
            mx.eval([piece for rows in self._hidden for piece in rows.pieces[-1:]])

    def _read_text(self) -> None:
        for module in range(len(self._modules)):
            self._advance(module, min(self._num_known, len(self._tokens) - 1 - module))
        mx.eval([layer.state for cache in self._caches for layer in cache if not layer.empty()])

    def _logits(self, position: int) -> mx.array:
        depth, logits = position - self._num_known, None
        if self._begin < position and self._begin < self._num_known:
            if depth <= 0:
                end = min(len(self._tokens) - 1, self._num_known)
                logits = self._advance(0, end, end + 1 - position)
            elif self._num_parallel:
                self._advance(0, self._num_known)
                logits = self._parallel[depth - 1 : depth] if depth <= self._num_parallel else None
            else:
                module = min(depth, len(self._modules) - 1)
                logits = self._advance(module, position - module)
        return mx.zeros((1, self._modules[0].vocab_size)) if logits is None else logits

    def _advance(self, module: int, end: int, num_rows: int = 1) -> mx.array | None:
        """Have a module read the positions before `end`. Returns: the last rows of logits; None if nothing was read."""
        rows: mx.array | None = None
        while self._ends[module] < end:
            begin = self._ends[module]
            if module > 0:
                given_before = self._hidden[module]
                if not given_before.pieces or begin < given_before.begin:
                    # Its input was left out when the state was taken.
                    self._cut(module - 1, begin)
                self._advance(module - 1, min(end, self._num_known))
            is_last_pass = end - begin <= MAX_READ_WITH_LOGITS + num_rows
            hidden = self._entering(module, begin, end if is_last_pass else min(begin + MAX_READ, end - num_rows))
            num_read = hidden.shape[0]
            first_token = begin + 1 + module
            tokens = mx.array(self._tokens[first_token : first_token + num_read])
            given, logits = self._modules[module].read(hidden, tokens, self._caches[module])
            self._hidden[module + 1].drop_from(begin)
            self._hidden[module + 1].add(begin, given)
            self._ends[module] = begin + num_read
            self._parallel = logits[num_read:]
            rows = logits[:num_read]
            if not is_last_pass:
                mx.eval(given, [layer.state for layer in self._caches[module]])
        return None if rows is None else rows[-num_rows:]

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
