"""Shared passes: forward passes of one model over several texts, where the model and their caches allow it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from actors.mlx.cache_kinds import kinds_of
from actors.mlx.cache_options import CacheOptions
from actors.mlx.layer_evaluation import LayerEvaluation, evaluating
from actors.mlx.memory import release_buffers
from actors.mlx.row_caches import MAX_WIDTH
from actors.mlx.sequence import MLXSequence
from actors.model import Feed
from actors.rows import RowPool, Rows
from actors.trained.features import FeatureRecorder, RecorderSlot, recording

# Modules of mlx-lm whose attention reaches into the cache, or expects the offset of one text.
_NEEDS_ONE_TEXT = {"afm7", "gemma3n", "gpt_bigcode", "internlm3", "llama4", "minimax_m3_vl", "phi3small"}

# Modules of mlx-lm whose recurrent layers read `ArraysCache.lengths`, and so keep padding out of their states.
_READS_LENGTHS = {"falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "mamba2", "plamo2", "qwen3_5", "qwen3_next"}

# The probe's texts: the length at which each joins, and how many of its tokens the two passes read. The second pass
# shows whether padding of the first has got into a recurrent state.
_PROBE_TOKENS = tuple(range(1, 12))
_PROBES = ((3, (2, 1)), (6, (3, 1)))

# Largest difference allowed between logits of the probe, as a fraction of their range. A wrong mask makes a difference
# as large as the range; rounding in bfloat16, a hundredth of it.
_TOLERANCE, _FLOAT32_TOLERANCE = 0.1, 1e-3


class RowBatch(Rows):
    """Rows that an mlx-lm model reads."""

    def __init__(
        self, model: Module, caches: Sequence[Any], layer_evaluation: LayerEvaluation, *, vocab_size: int
    ) -> None:
        super().__init__(caches)
        self._model = model
        self._features: dict[object, mx.array] = {}  # by key: (tokens, width) of the last pass
        self._vocab_size = vocab_size
        self._layer_evaluation = layer_evaluation

    def drop(self, key: object) -> None:
        self._features.pop(key, None)
        super().drop(key)

    def read(self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None) -> None:
        """Process the first tokens of all rows, which are empty, and evaluate their caches; otherwise as `feed`."""
        self.feed(tokens, recorder)
        mx.eval(self.state, list(self._features.values()))
        release_buffers()

    def feed(
        self, tokens: Mapping[object, tuple[int, ...]], recorder: FeatureRecorder | None = None
    ) -> dict[object, mx.array]:
        """Process at most `widest_row` ids of some rows. Returns: by key, (tokens, V) logits of each of these, lazy."""
        last_id = self._vocab_size - 1
        fed = [tuple(min(token, last_id) for token in tokens.get(key, ())) for key in self.keys]
        widths = {key: len(row) for key, row in zip(self.keys, fed, strict=True)}
        width = max(widths.values())
        padded = mx.array([row + (0,) * (width - len(row)) for row in fed])
        with evaluating(self._layer_evaluation):
            logits = self.run(widths, partial(self._forward, padded, widths, recorder))
        return {key: logits[row, : widths[key]] for row, key in enumerate(self.keys) if widths[key] > 0}

    def feed_ahead(self, keys: Sequence[object], tokens: mx.array, recorder: FeatureRecorder | None = None) -> mx.array:
        """Process one token of each row in `keys`, (n,), which may be lazy. Returns: (n, V) logits, lazy."""
        rows = [self._row_of[key] for key in keys]
        are_all = rows == list(range(len(self)))
        fed = tokens
        if not are_all:
            fed = mx.zeros((len(self),), tokens.dtype)
            fed[mx.array(rows)] = tokens
        ids = mx.minimum(fed.astype(mx.int32), self._vocab_size - 1)[:, None]
        widths = dict.fromkeys(keys, 1)
        # Layers are not evaluated one by one, so that the last pass's tokens can be read while this one is computed.
        logits = self.run(widths, partial(self._forward, ids, widths, recorder))[:, 0]
        return logits if are_all else logits[mx.array(rows)]

    def _forward(
        self, tokens: mx.array, widths: Mapping[object, int], recorder: FeatureRecorder | None, caches: list[Any]
    ) -> mx.array:
        """(B, W, V) logits of a pass over (B, W) ids, of which `widths` are not padding; lazy."""
        with recording(recorder):
            logits: mx.array = self._model(tokens, cache=caches)
        self._features = {}
        if recorder is not None:
            features = recorder.take((tokens.shape[0], tokens.shape[1]))
            taken = ((row, key, widths.get(key, 0)) for row, key in enumerate(self.keys))
            self._features = {key: features[row, :width] for row, key, width in taken if width > 0}
        return logits

    def features(self, key: object) -> mx.array | None:
        return self._features.get(key)


class SharedPasses:
    """The part of an `MLXModel` that concerns several texts."""

    def __init__(self, model: Module, options: CacheOptions, *, vocab_size: int) -> None:
        self.module = model  # mlx-lm's
        self._options = options
        self.vocab_size = vocab_size
        self.recorder_slot = RecorderSlot()
        # Not a bound method: without the cycle, the model is freed as soon as nobody uses it.
        self._new_batch = partial(_new_batch, model, options, vocab_size)
        self._pool = RowPool[MLXSequence, RowBatch](self._new_batch)
        self._obstacle = self._find_known_obstacle()
        self._is_probed = self._obstacle is not None

    def feed_together(self, feeds: Sequence[Feed]) -> list[mx.array]:
        candidates = [feed.sequence for feed in feeds if len(feed.tokens) <= MAX_WIDTH and not feed.alone]
        rows = self._joined(candidates)
        by_text = {feed.sequence: feed for feed in feeds}
        logits: dict[object, mx.array] = {}
        if rows:
            fed = self._pool.batch.feed({text: by_text[text].tokens for text in rows}, _recorder_for(rows))
            logits = {text: fed[text][-by_text[text].num_logits :] for text in rows}
        for text in rows:
            text.count_row()
        return [logits[feed.sequence] if feed.sequence in logits else _fed_alone(feed) for feed in feeds]

    @property
    def widest_row(self) -> int:
        return self._pool.batch.widest_row

    def read_together(self, sequences: Sequence[Any], tokens: Sequence[tuple[int, ...]]) -> None:
        """The texts become a batch of their own; see `RowPool.offer`."""
        if self._find_obstacle() is not None:
            for text, read in zip(sequences, tokens, strict=True):
                text.feed(read, 0)
            return
        batch = self._new_batch(sequences[0])
        for text in sequences:
            text.join(batch)
        batch.read(dict(zip(sequences, tokens, strict=True)), _recorder_for(sequences))
        for text in sequences:
            text.count_row()
        self._pool.offer(batch, sequences)

    def feed_ahead(self, sequences: Sequence[Any], tokens: mx.array) -> mx.array:
        rows = self._joined(sequences)
        logits_of: dict[MLXSequence, mx.array] = {}
        if rows:
            are_all = len(rows) == len(sequences)
            fed = tokens if are_all else tokens[mx.array([sequences.index(text) for text in rows])]
            logits = self._pool.batch.feed_ahead(rows, fed, _recorder_for(rows))
            for text in rows:
                text.count_row()
            if are_all:
                return logits
            logits_of = {text: logits[i : i + 1] for i, text in enumerate(rows)}
        each = [
            logits_of[text] if text in logits_of else text.feed_lazy(tokens[i : i + 1])
            for i, text in enumerate(sequences)
        ]
        return each[0] if len(each) == 1 else mx.concatenate(each)

    def abandon_shared(self) -> None:
        self._pool.abandon()

    def _joined(self, texts: Sequence[Any]) -> list[MLXSequence]:
        self._pool.begin_feed()
        return self._pool.joined(texts, self._may_share)

    def _may_share(self, text: Any) -> bool:
        return isinstance(text, MLXSequence) and (text.is_row or (text.can_be_row and self._find_obstacle() is None))

    # --- what cannot share ------------------------------------------------------------------------

    def sharing_obstacle(self, *, rewinds_passes: bool = False) -> str | None:
        """Feeds the model some tokens to find out."""
        if rewinds_passes and not self._pool.batch.rewinds_passes:
            return "its rows cannot go back by more than one pass"
        return self._find_obstacle()

    def _find_obstacle(self) -> str | None:
        if not self._is_probed:
            # Stands if the probe raises.
            self._obstacle, self._is_probed = "its forward pass failed when that was tried", True
            agrees = self._agrees()
            self._obstacle = None if agrees else "it gives other logits for two texts at once than for each alone"
        return self._obstacle

    def _find_known_obstacle(self) -> str | None:
        if self._options.rewind != "auto":
            return f'rewind="{self._options.rewind}" is for one text a pass'
        if self._options.kv_bits is not None:
            return "quantised caches hold one text"
        caches = self._options.make_cache(self.module)
        if others := sorted({kind.name(layer) for kind, layer in kinds_of(caches) if not kind.can_be_row}):
            return f"caches of the kind {', '.join(others)} hold one text"
        families = {type(module).__module__.rpartition(".")[2] for module in self.module.modules()}
        if self._options.one_by_one or families & _NEEDS_ONE_TEXT:
            return "this family's layers expect one text"
        if self._pool.batch.is_recurrent and not families & _READS_LENGTHS:
            return "this family's recurrent layers do not tell padding from text"
        return None

    def _agrees(self) -> bool:
        try:
            return all(is_close(*pair) for pair in zip(self._probed_alone(), self._probed_together(), strict=True))
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # whatever a model's code runs into
            return False

    def _probed_alone(self) -> list[mx.array]:
        logits = []
        for length, widths in _PROBES:
            caches = self._options.make_cache(self.module)
            self.module(mx.array([_PROBE_TOKENS[:length]]), cache=caches)
            for begin, end in _passes(length, widths):
                logits.append(self.module(mx.array([_PROBE_TOKENS[begin:end]]), cache=caches)[0])
        return logits

    def _probed_together(self) -> list[mx.array]:
        batch = self._new_batch(None)
        lengths = [length for length, _ in _PROBES]
        caches = {length: self._options.make_cache(self.module) for length in lengths}
        for length in lengths:
            batch.join(length, caches[length], 0)
        batch.read({length: _PROBE_TOKENS[:length] for length in lengths})
        fed = []
        for each in zip(*(_passes(length, widths) for length, widths in _PROBES), strict=True):
            parts = [_PROBE_TOKENS[begin:end] for begin, end in each]
            fed.append(batch.feed(dict(zip(lengths, parts, strict=True))))
            # The first text leaves, and joins again with the tokens that it has read.
            batch.join(lengths[0], caches[lengths[0]], batch.leave(lengths[0], caches[lengths[0]]))
        return [logits[length] for length in lengths for logits in fed]


def _recorder_for(texts: Iterable[MLXSequence]) -> FeatureRecorder | None:
    return next((recorder for text in texts if (recorder := text.recorded.recorder) is not None), None)


def _passes(length: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(widths, initial=length)))


def is_close(expected: mx.array, found: mx.array) -> bool:
    """Whether logits of the probe agree but for rounding, and are -inf in the same places."""
    tolerance = _FLOAT32_TOLERANCE if expected.dtype == mx.float32 else _TOLERANCE
    expected, found = expected.astype(mx.float32), found.astype(mx.float32)
    lacks = expected == -mx.inf
    known = mx.where(lacks, mx.max(expected), expected)
    span = mx.max(known) - mx.min(known)
    difference = mx.where(lacks & (found == -mx.inf), 0.0, mx.abs(known - found))
    return bool((mx.max(difference) <= tolerance * span).item())


def _fed_alone(feed: Feed) -> mx.array:
    if isinstance(feed.sequence, MLXSequence) and feed.sequence.is_row:
        # It was prepared as a row, whose passes the batch can undo. Alone, it must be prepared again.
        feed.sequence.leave_batch()
        feed.sequence.prepare(len(feed.tokens), feed.sequence.length)
    logits = feed.sequence.feed(feed.tokens, feed.num_logits)
    assert logits is not None
    return logits


def _new_batch(model: Module, options: CacheOptions, vocab_size: int, first: MLXSequence | None) -> RowBatch:
    caches = options.make_cache(model)
    caches = caches if all(kind.can_be_row for kind, _ in kinds_of(caches)) else []
    layer_evaluation = LayerEvaluation.WHOLE if first is None else first.layer_evaluation
    return RowBatch(model, caches, layer_evaluation, vocab_size=vocab_size)
