"""Decoding several texts without drafts, in passes that they share, one pass ahead; on the target's own thread.

The next pass is launched before the tokens that it reads are read back. So building its graph, and the tokens' way
through the event loop, cost nothing while the device computes. Texts of one kind (`LogitsPipeline.kind`) are judged by
one set of array operations. A text whose processors depend on its tokens is judged by itself; a user's processor or
sampler is called with evaluated logits, so then the tokens of a pass ahead are chosen in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import cast

import attrs
import mlx.core as mx

from actors.model import CachedSequence, CacheLostError, Feed, Model
from actors.sampling.logit_check import LogitCheck, not_a_number
from actors.sampling.logits_pipeline import LogitsPipeline, TokenHistory
from protocol.acceptance import choices_together
from protocol.cached_tokens import FeedPlan
from protocol.errors import OutriderError
from protocol.messages import Open


@attrs.define(eq=False)
class PlainRow:
    """One text.

    Attributes:
        sequence: its cache.
        opened: the message that began its session.
        logits_pipeline: of its session.
        plan: how to bring the cache in line with the committed text. It feeds one token if the rows are ahead.
        history: of the committed text.
    """

    sequence: CachedSequence
    opened: Open
    logits_pipeline: LogitsPipeline
    plan: FeedPlan
    history: TokenHistory

    @property
    def position(self) -> int:
        """Of the token that comes next."""
        return self.plan.keep + len(self.plan.feed)


@attrs.frozen
class _Chosen:
    """The next token of each of several texts, which may not be computed yet.

    Attributes:
        tokens: (n,) ids.
        largest: (n,) the largest logit of each of the model's own rows.
        own: by index, the logit check of a text that is judged by itself, or the error of its processors.
    """

    tokens: mx.array
    largest: mx.array
    own: dict[int, LogitCheck | OutriderError]

    def launch(self) -> None:
        mx.async_eval(*self._arrays())

    def read(self, rows: Sequence[PlainRow]) -> list[int | Exception]:
        """The tokens, or the errors of texts from whose logits none can be chosen."""
        mx.eval(*self._arrays())
        tokens, largest = cast(list[int], self.tokens.tolist()), cast(list[float], self.largest.tolist())
        found: list[int | Exception] = [
            token if math.isfinite(value) else not_a_number(value, row.position, "target")
            for row, token, value in zip(rows, tokens, largest, strict=True)
        ]
        for index, check in self.own.items():
            error = check.error(0, rows[index].position, "target") if isinstance(check, LogitCheck) else check
            if error is not None:
                found[index] = error
        return found

    def of(self, indices: Sequence[int]) -> _Chosen:
        """The same for some of the texts."""
        some = mx.array(list(indices))
        own = {new: self.own[old] for new, old in enumerate(indices) if old in self.own}
        return _Chosen(self.tokens[some], self.largest[some], own)

    def _arrays(self) -> list[mx.array]:
        checks = [check for check in self.own.values() if isinstance(check, LogitCheck)]
        return [self.tokens, self.largest, *(array for check in checks for array in check.arrays())]


@attrs.frozen
class _PassAhead:
    """A pass whose tokens its texts do not count yet.

    Attributes:
        sequences: the texts.
        logits: (n, V) after these tokens; lazy.
        chosen: from them; None if that is left to the next step.
    """

    sequences: tuple[CachedSequence, ...]
    logits: mx.array
    chosen: _Chosen | None


class PlainRows:
    """The passes of one model over texts that nobody drafts for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ahead: _PassAhead | None = None

    @property
    def ahead(self) -> Sequence[CachedSequence]:
        """The texts of a pass whose tokens nobody has; none if there is none. In any thread while no step runs."""
        return () if self._ahead is None else self._ahead.sequences

    def step(self, rows: Sequence[PlainRow], *, goes_ahead: bool) -> list[int | Exception]:
        """The next token of each text.

        Args:
            rows: the texts. Those of the last call that are missing do not keep what was fed ahead.
            goes_ahead: whether each of them goes on with one more token, whatever it is.

        Returns: by text the token, or the error that concerns it alone. `CacheLostError`: a pass that it shared has
            failed since this one was planned.
        Raises: whatever the model raises: the pass has failed for all, and their caches are empty.
        """
        sound = [row for row in rows if row.sequence.length == row.plan.keep]
        try:
            found = iter(self._tokens(sound, goes_ahead) if sound else ())
        except BaseException:
            # What is in the caches now is not known.
            self._ahead = None
            self._model.abandon_shared()
            for row in rows:
                row.sequence.forget()
            raise
        if len(sound) == len(rows):
            return list(found)
        lost = {row.sequence for row in rows} - {row.sequence for row in sound}
        return [CacheLostError() if row.sequence in lost else next(found) for row in rows]

    def _tokens(self, rows: Sequence[PlainRow], goes_ahead: bool) -> list[int | Exception]:
        chosen = self._after_pass_ahead(rows)
        if chosen is None:
            logits = mx.concatenate(self._model.feed_together([Feed(row.sequence, row.plan.feed, 1) for row in rows]))
            if any(row.logits_pipeline.runs_user_code for row in rows):
                # User code must not be blamed for a pass that fails.
                mx.eval(logits)
            chosen = _choose(rows, logits)
        if goes_ahead:
            chosen.launch()
            self._go_ahead(rows, chosen)
        found = chosen.read(rows)
        for row in rows:
            row.sequence.check(row.position)
        return found

    def _go_ahead(self, rows: Sequence[PlainRow], chosen: _Chosen) -> None:
        sequences = tuple([row.sequence for row in rows])
        logits = self._model.feed_ahead(sequences, chosen.tokens)
        if logits is None:
            return
        chosen_ahead = None
        if not any(row.logits_pipeline.runs_user_code for row in rows):
            chosen_ahead = _choose(rows, logits, chosen.tokens)
            chosen_ahead.launch()
        else:
            mx.async_eval(logits)
        self._ahead = _PassAhead(sequences, logits, chosen_ahead)

    def _after_pass_ahead(self, rows: Sequence[PlainRow]) -> _Chosen | None:
        """The tokens after the pass ahead, which the texts keep; None if there is none that has read their tokens."""
        ahead, self._ahead = self._ahead, None
        sequences = tuple([row.sequence for row in rows])
        if ahead is None or any(len(row.plan.feed) != 1 for row in rows):
            return None
        if not set(ahead.sequences).issuperset(sequences):
            return None
        if not self._model.count_ahead(sequences, [row.plan.feed[0] for row in rows]):
            return None
        if ahead.sequences == sequences:
            return ahead.chosen or _choose(rows, ahead.logits)
        indices = [ahead.sequences.index(sequence) for sequence in sequences]
        return ahead.chosen.of(indices) if ahead.chosen else _choose(rows, ahead.logits[mx.array(indices)])


def _choose(rows: Sequence[PlainRow], logits: mx.array, ahead: mx.array | None = None) -> _Chosen:
    """Choose the next token of each text; lazy, but that user code is called.

    Args:
        logits: (n, V).
        ahead: (n,) tokens that come after the rows' plans and before these logits; None if there are none.
    """
    kinds: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(row.logits_pipeline.kind or index, []).append(index)
    own: dict[int, LogitCheck | OutriderError] = {}
    parts = []
    for kind, indices in kinds.items():
        if isinstance(kind, int):
            token, own[kind] = _choose_alone(
                rows[kind], logits[kind : kind + 1], None if ahead is None else ahead[kind]
            )
            parts.append(token)
        else:
            some = logits if len(kinds) == 1 else logits[mx.array(indices)]
            parts.append(_choose_alike([rows[index] for index in indices], some, ahead is not None))
    tokens = parts[0]
    if len(kinds) > 1:
        order = [index for indices in kinds.values() for index in indices]
        tokens = mx.concatenate([part.astype(mx.uint32) for part in parts])[mx.argsort(mx.array(order))]
    return _Chosen(tokens, mx.max(logits, axis=-1), own)


def _choose_alike(rows: Sequence[PlainRow], logits: mx.array, is_ahead: bool) -> mx.array:
    settings, pipeline = rows[0].opened.settings, rows[0].logits_pipeline
    decisions = [(row.opened.seed, row.position + is_ahead) for row in rows] if settings.temperature > 0 else []
    return choices_together(pipeline.filter(logits, 0), settings.rule, settings.temperature, decisions)


def _choose_alone(
    row: PlainRow, logits: mx.array, before: mx.array | None
) -> tuple[mx.array, LogitCheck | OutriderError]:
    """The next token of a text, and its logit check. Of one whose processors fail any token, and the error."""
    settings, pipeline, position = row.opened.settings, row.logits_pipeline, row.position
    if before is None:
        try:
            processed = pipeline.process(logits, row.history, position)
            filtered = pipeline.filter(processed, position)
            sampled = pipeline.sample(filtered)
        except OutriderError as error:
            return mx.zeros((1,), mx.uint32), error
    else:
        processed, sampled = pipeline.process_lazily(logits, row.history, position, before.reshape(1)), None
        position += 1
        filtered = pipeline.filter(processed, position)
    if sampled is None:
        sampled = choices_together(filtered, settings.rule, settings.temperature, [(row.opened.seed, position)])
    return sampled, LogitCheck.of(logits, processed)
