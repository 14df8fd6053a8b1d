"""A draft model of another vocabulary, behind the interface of `actors.model` as if it had its target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import cast

import attrs
import mlx.core as mx

from actors.mlx.model import MLXModel
from actors.model import CachedSequence, Feed
from actors.translated.translated_sequence import TokenTables, TranslatedSequence
from protocol.vocabulary_map import VocabularyMap

_TOKENS_PER_TOKEN = 2  # a text has about as many tokens in either vocabulary, seldom twice as many


class TranslatedModel:
    """A draft model on its thread, on which it must also be made.

    Tokens and logits are the target's. The logits are a distribution over the tokens that both vocabularies have, and
    drafts are drawn from it, so all acceptance rules stay exact.
    """

    records_features = False  # a draft model's are read by nobody

    def __init__(self, model: MLXModel, vocabulary_map: VocabularyMap) -> None:
        self._model = model
        self.vocabulary_map = vocabulary_map  # which tokens both have, and how the others are read
        self.vocab_size = len(vocabulary_map.readings)  # the target's; see `Model.vocab_size`
        self.module, self.num_bytes = model.module, model.num_bytes
        # In the model's own tokens, of which a text may have more than of the target's; its sequence checks that.
        self.context_length = model.context_length
        own = model.cache_size
        self.cache_size = attrs.evolve(
            own,
            slot_bytes=_TOKENS_PER_TOKEN * own.slot_bytes,
            dense_slot_bytes=_TOKENS_PER_TOKEN * own.dense_slot_bytes,
            windows=tuple((most_slots, _TOKENS_PER_TOKEN * slot_bytes) for most_slots, slot_bytes in own.windows),
        )
        self._tables = TokenTables.of(vocabulary_map)

    def evaluating_layers(self) -> AbstractContextManager[None]:
        """See `MLXModel.evaluating_layers`."""
        return self._model.evaluating_layers()

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
    def widest_row(self) -> int:
        return self._model.widest_row

    def read_together(self, sequences: Sequence[CachedSequence], tokens: Sequence[tuple[int, ...]]) -> None:
        """See `Model.read_together`. One after another: texts of another vocabulary differ in length."""
        for sequence, read in zip(sequences, tokens, strict=True):
            sequence.feed(read, 0)

    def feed_ahead(self, sequences: Sequence[CachedSequence], tokens: mx.array) -> mx.array:
        return mx.concatenate([sequence.feed_lazy(tokens[i : i + 1]) for i, sequence in enumerate(sequences)])

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        return self._model.sharing_obstacle(rewinds_passes=rewinds_passes)

    def abandon_shared(self) -> None:
        self._model.abandon_shared()

    def open_sequence(self, *, beside_another: bool) -> TranslatedSequence:
        own = self._model.open_sequence(beside_another=beside_another)
        return TranslatedSequence(own, self.vocabulary_map, self._tables, self._model.context_length)
