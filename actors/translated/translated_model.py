"""A draft model of another vocabulary, behind the interface of `actors.model` as if it had its target's tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import cast

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import Feed, FeedsEach, ReusableSequence, RewindMode
from protocol.errors import ModelError, RewindError
from protocol.prefill_chunks import FIXED_CHUNK_TOKENS
from protocol.vocabulary_map import VocabularyMap

_TOKENS_PER_TOKEN = 2  # a text has about as many tokens in either vocabulary, seldom twice as many
# How many of the model's own tokens to expect for each of several tokens of the target, before those are known. Most
# tokens have fewer; a drafted one has one.
TOKENS_FORESEEN = 4


class TokenTables:
    """A vocabulary map, and what it says as arrays, evaluated."""

    def __init__(self, vocabulary_map: VocabularyMap) -> None:
        self.map = vocabulary_map
        proposed = {own: token for token, own in vocabulary_map.shared.items()} | dict(vocabulary_map.beginnings)
        # (n,) the model's own tokens that stand for one of the target's when they are proposed, and these.
        self.own_ids, self.proposed_ids = mx.array([*proposed]), mx.array([*proposed.values()])
        # (V,) the model's own token that the target's is read as, or the last of them.
        self.last_read = mx.array([reading[-1] for reading in vocabulary_map.readings])
        mx.eval(self.own_ids, self.proposed_ids, self.last_read)

    def translated(self, rows: mx.array) -> mx.array:
        """(n, own V) logits of the model's own tokens to (n, V) float32 ones of the target's; -inf for those it lacks.
        Probabilities of tokens that stand for the same one of the target are added.
        """
        rows = rows.astype(mx.float32)
        top = mx.max(rows, axis=-1, keepdims=True)
        weights = mx.exp(rows - top)[:, self.own_ids]
        summed = mx.zeros((self.last_read.size, rows.shape[0])).at[self.proposed_ids].add(weights.T)
        return mx.log(summed.T) + top


@attrs.frozen
class TranslatedTokens:
    """Tokens of the target, translated to be fed to the model."""

    tokens: tuple[int, ...]  # the model's own
    ends: tuple[int, ...]  # the length of the text in the model's own tokens after each of the target's
    num_rows: int  # of logits to ask for, at the end: those that are wanted, and others between them
    wanted: tuple[int, ...]  # which of those rows are wanted


class TranslatedSequence(ReusableSequence):
    """See `CachedSequence`. Lengths and tokens are the target's. Each token is translated by itself, so a text always
    has the same tokens of the model's own.
    """

    def __init__(self, own: ReusableSequence, tables: TokenTables, context_length: int | None) -> None:
        """Make an empty sequence around an empty one of the model's; `context_length` is in the model's own tokens."""
        self.own = own  # the text in the model's own tokens
        self._tables, self._context_length = tables, context_length
        # The length of the text in the model's own tokens, by its length in the target's; ascending.
        self._own_lengths = [0]

    def feed(self, tokens: tuple[int, ...], num_logits: int) -> mx.array | None:
        """Raises: ModelError: in its own tokens, the text does not fit the model's context."""
        reading = self.read(tokens, num_logits)
        rows = self.own.feed(reading.tokens, reading.num_rows)
        if rows is None:
            self._own_lengths += reading.ends
            return None
        return self.take_rows(reading, rows)

    def feed_lazy(self, token: mx.array) -> mx.array:
        """The token must be one that the model can propose."""
        self._follow_own()
        self._check_context(self._own_lengths[-1] + 1)
        rows = self.own.feed_lazy(self._tables.last_read[token])
        self._own_lengths.append(self._own_lengths[-1] + 1)
        return self._tables.translated(rows)

    def read(self, tokens: tuple[int, ...], num_logits: int) -> TranslatedTokens:
        """What to feed the model for tokens after the cached ones; see `feed`."""
        self._follow_own()
        begin = self._own_lengths[-1]
        readings = [self._tables.map.read(token, is_first=begin == 0 and i == 0) for i, token in enumerate(tokens)]
        ends = tuple(accumulate(map(len, readings), initial=begin))[1:]
        self._check_context(ends[-1])
        own_tokens = tuple(chain.from_iterable(readings))
        if num_logits == 0:
            return TranslatedTokens(own_tokens, ends, 0, ())
        first = ends[-num_logits]
        return TranslatedTokens(
            own_tokens, ends, ends[-1] - first + 1, tuple(end - first for end in ends[-num_logits:])
        )

    def take_rows(self, reading: TranslatedTokens, rows: mx.array) -> mx.array:
        """Count what was read. Returns: the wanted rows of logits, translated: (n, V) of the target's tokens; lazy."""
        self._own_lengths += reading.ends
        if len(reading.wanted) < reading.num_rows:
            rows = rows[mx.array(reading.wanted)]
        return self._tables.translated(rows)

    def _check_context(self, num_tokens: int) -> None:
        if self._context_length is not None and num_tokens > self._context_length:
            raise ModelError(
                f"the text has {num_tokens} tokens of the draft model, and its context takes {self._context_length}"
            )

    def _follow_own(self) -> None:
        """Forget the lengths beyond what the model has cached, which is less after a shared pass has failed."""
        del self._own_lengths[self.length + 1 :]

    def prepare(self, num_tokens: int, settled: int) -> RewindMode:
        self._follow_own()
        num_foreseen = 1 if num_tokens == 1 else num_tokens * TOKENS_FORESEEN
        return self.own.prepare(num_foreseen, self._own_lengths[min(settled, self.length)])

    def rewind(self, length: int) -> int:
        self._follow_own()
        if length >= len(self._own_lengths):
            raise RewindError(f"asked to rewind to {length} tokens a cache that holds {self.length}")
        # Checkpoints of the model lie where a token of the target ends, so at most one further attempt is needed.
        while self.own.rewind(self._own_lengths[length]) < self._own_lengths[length]:
            length = self.length
        del self._own_lengths[length + 1 :]
        return length

    def check(self, length: int) -> None:
        if length >= len(self._own_lengths):
            raise RewindError(f"the text should have {length} tokens, it has {len(self._own_lengths) - 1}")
        self.own.check(self._own_lengths[length])

    @property
    def length(self) -> int:
        return bisect_right(self._own_lengths, self.own.length) - 1

    def forget(self) -> None:
        self.own.forget()
        self._own_lengths = [0]

    def close(self) -> None:
        self.own.close()

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def needs_prefix_checkpoints(self) -> bool:
        return self.own.needs_prefix_checkpoints

    @property
    def depends_on_passes(self) -> bool:
        return self.own.depends_on_passes

    def add_prefix_checkpoint(self) -> None:
        self.own.add_prefix_checkpoint()

    def reusable_length(self, num_common: int, num_read: int, pass_tokens: int = FIXED_CHUNK_TOKENS) -> int:
        self._follow_own()
        length = min(num_common, self.length)
        while length > 0:
            own_length = self._own_lengths[length]
            num_own_read = own_length + TOKENS_FORESEEN * (num_read - length)
            reusable = self.own.reusable_length(own_length, num_own_read, pass_tokens)
            if reusable == own_length:
                return length
            length = bisect_right(self._own_lengths, reusable) - 1
        return 0

    def reuse(self, length: int) -> None:
        self.own.reuse(self._own_lengths[length])
        del self._own_lengths[length + 1 :]

    @property
    def can_copy(self) -> bool:  # type: ignore[override]
        """Whether the model's own sequence can be copied."""
        return self.own.can_copy

    def copy(self, length: int) -> TranslatedSequence:
        own = self.own.copy(self._own_lengths[length])
        copy = TranslatedSequence(own, self._tables, self._context_length)
        copy._own_lengths = self._own_lengths[: length + 1]
        return copy


class TranslatedModel(FeedsEach):
    """A draft model on its thread, on which it must also be made. Its logits are a distribution over the target's
    tokens that both vocabularies have, from which drafts are drawn: acceptance rules stay exact.
    """

    records_features = False  # a draft model's are read by nobody

    def __init__(self, model: MLXModel, vocabulary_map: VocabularyMap) -> None:
        self._model = model
        self.vocabulary_map = vocabulary_map  # which tokens both have, and how the others are read
        self.vocab_size = len(vocabulary_map.readings)  # the target's; see `Model.vocab_size`
        self.module, self.num_bytes = model.module, model.num_bytes
        self.evaluating_layers = model.evaluating_layers
        # In the model's own tokens, of which a text may have more than of the target's; its sequence checks that.
        self.context_length = model.context_length
        own = model.cache_size
        self.cache_size = attrs.evolve(
            own,
            slot_bytes=_TOKENS_PER_TOKEN * own.slot_bytes,
            dense_slot_bytes=_TOKENS_PER_TOKEN * own.dense_slot_bytes,
            windows=tuple((most_slots, _TOKENS_PER_TOKEN * slot_bytes) for most_slots, slot_bytes in own.windows),
        )
        self._tables = TokenTables(vocabulary_map)

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        sequences = [cast(TranslatedSequence, feed.sequence) for feed in feeds]
        readings = [each.read(feed.tokens, feed.num_logits) for each, feed in zip(sequences, feeds, strict=True)]
        own_feeds = [
            Feed(each.own, reading.tokens, reading.num_rows, feed.alone)
            for each, reading, feed in zip(sequences, readings, feeds, strict=True)
        ]
        all_rows = self._model.feed_together(own_feeds)
        read = zip(sequences, readings, all_rows, strict=True)
        return [each.take_rows(reading, rows) for each, reading, rows in read]

    @property
    def widest_row(self) -> int:  # type: ignore[override]
        return self._model.widest_row

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        return self._model.sharing_obstacle(rewinds_passes=rewinds_passes)

    def abandon_shared(self) -> None:
        self._model.abandon_shared()

    def open_sequence(self, *, alongside_model: bool) -> TranslatedSequence:
        own = self._model.open_sequence(alongside_model=alongside_model)
        return TranslatedSequence(own, self._tables, self._model.context_length)
