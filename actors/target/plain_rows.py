"""Decoding texts without drafts, one or several in a pass, one pass ahead; on the target's own thread.

The next pass is launched before the tokens that it feeds are read back from the device. So building its graph, and the
tokens' way through the event loop, cost nothing while the device computes. The cache of a text that is *ahead* has its
last committed token already, and the next token is computed or being computed; the text gets that token before it takes
part in any other pass.

Texts of one kind (`LogitsPipeline.kind`) are judged by one set of array operations. A text whose processors depend on
its tokens is judged by itself. User code needs evaluated logits, so it chooses the token after a pass ahead only in the
next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import attrs
import mlx.core as mx

from actors.model import CachedSequence, CacheLostError, Feed, Model
from actors.sampling.logit_check import LogitCheck, not_a_number
from actors.sampling.logits_pipeline import NO_HISTORY, LogitsPipeline, TokenHistory, by_kind
from actors.workers.worker import Step
from protocol.acceptance import LazyLikelihoods, choices_together
from protocol.cached_tokens import FeedPlan
from protocol.errors import OutriderError
from protocol.messages import Features, Likelihood, Open
from protocol.trace import Share


@attrs.define(eq=False)
class PlainRow:
    """One text in passes without drafts.

    Attributes:
        sequence: its cache.
        opened: the message that began its session.
        logits_pipeline: of its session.
        plan: how to bring the cache in line with the committed text; feeds nothing while it is ahead.
        history: of the committed text.
        is_ahead: whether a pass ahead has fed the last committed token, and has its logits.
    """

    sequence: CachedSequence
    opened: Open
    logits_pipeline: LogitsPipeline
    plan: FeedPlan = attrs.field(factory=lambda: FeedPlan(0, ()))
    history: TokenHistory = NO_HISTORY
    is_ahead: bool = False
    # (1, V) logits of a pass ahead after which the next pass had other rows; the next token is chosen from them.
    _logits: mx.array | None = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.plan.keep + len(self.plan.feed)


@attrs.define
class PlainResult:
    """The result of a step for one text.

    Attributes:
        token: its next token, or the error that concerns this text alone. `CacheLostError`: a pass that the text shared
            has failed since this one was planned.
        fed: the feed that the cache has carried out; None if `token` is an error.
        likelihoods: of the token, if the session asks for them.
        features: of the tokens that were fed since the last step, if they are recorded.
    """

    token: int | Exception
    fed: FeedPlan | None = None
    likelihoods: tuple[Likelihood, ...] = ()
    features: Features | None = None


@attrs.frozen
class _Chosen:
    """The next token of each of several texts, which may not be computed yet.

    Attributes:
        tokens: (n,) ids.
        largest: (n,) the largest of the model's own logits in each row.
        own: by index, the logit check of a text that is judged by itself, or the error of its processors.
        likelihoods: by index, of a text that asks for them.
    """

    tokens: mx.array
    largest: mx.array
    own: dict[int, LogitCheck | OutriderError]
    likelihoods: dict[int, LazyLikelihoods]

    def launch(self) -> None:
        mx.async_eval(*self._arrays())

    def read(self, rows: Sequence[PlainRow]) -> list[PlainResult]:
        """Each text's token, or the error if none can be chosen from its logits."""
        mx.eval(*self._arrays())
        tokens, largest = cast(list[int], self.tokens.tolist()), cast(list[float], self.largest.tolist())
        results = [
            PlainResult(token if math.isfinite(value) else not_a_number(value, row.position, "target"))
            for row, token, value in zip(rows, tokens, largest, strict=True)
        ]
        for index, check in self.own.items():
            error = check.error(0, rows[index].position, "target") if isinstance(check, LogitCheck) else check
            if error is not None:
                results[index].token = error
        for index, lazy in self.likelihoods.items():
            results[index].likelihoods = lazy.read()
        return results

    def _arrays(self) -> list[mx.array]:
        arrays = [self.tokens, self.largest]
        for check in self.own.values():
            arrays += check.arrays() if isinstance(check, LogitCheck) else []
        for lazy in self.likelihoods.values():
            arrays += lazy.arrays()
        return arrays


@attrs.frozen
class _PassAhead:
    """A pass over the next tokens of some texts, launched before anybody has asked for it.

    Attributes:
        rows: the texts.
        logits: (n, V) after these tokens; lazy.
        chosen: the tokens chosen from them; None if the next step chooses.
    """

    rows: tuple[PlainRow, ...]
    logits: mx.array
    chosen: _Chosen | None


class PlainRows:
    """The passes of one model over texts that nobody drafts for."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ahead: _PassAhead | None = None

    def steps(
        self, rows: Sequence[PlainRow], shares: Sequence[Share], num_tokens: int, *, goes_ahead: bool
    ) -> Step[list[PlainResult]]:
        """Decode some tokens of each text, one of each in a step; fewer if a text ends or fails.

        Args:
            rows, shares: the texts, and their parts in the first step.
            num_tokens: of each, >= 1. If more than 1, no text may have processors that depend on its tokens.
            goes_ahead: whether each text goes on with one more token after these, whatever they are.
        """
        results = self._step(rows, goes_ahead=goes_ahead or num_tokens > 1)
        if num_tokens == 1 or any(
            isinstance(each.token, Exception) or each.token in row.opened.stop_tokens
            for row, each in zip(rows, results, strict=True)
        ):
            return Step(results)
        for row in rows:
            row.plan = FeedPlan(row.position + 1, ())
        shares = tuple([Share(share.session, share.round + 1, 1) for share in shares])
        following = partial(self.steps, rows, shares, num_tokens - 1, goes_ahead=goes_ahead)
        return Step(results, following, len(rows), shares if len(shares) > 1 else ())

    def _step(self, rows: Sequence[PlainRow], *, goes_ahead: bool) -> list[PlainResult]:
        """The next token of each text.

        Args:
            rows: the texts. Other texts that are ahead stay ahead.
            goes_ahead: whether each of them goes on with one more token, whatever it is.

        Raises: whatever the model raises: the pass has failed for all, and their caches are empty.
        """
        results = [PlainResult(CacheLostError()) for _ in rows]
        sound = []
        for index, row in enumerate(rows):
            if row.sequence.length == row.plan.keep:
                sound.append(index)
            else:
                row.is_ahead, row._logits = False, None
        try:
            if sound:
                decoded = self._decode([rows[index] for index in sound], goes_ahead)
                for index, result in zip(sound, decoded, strict=True):
                    results[index] = result
        except BaseException:
            # What is in the caches now is not known.
            self._ahead = None
            self._model.abandon_shared()
            for row in rows:
                row.sequence.forget()
                row.is_ahead, row._logits = False, None
            raise
        return results

    def _decode(self, rows: Sequence[PlainRow], goes_ahead: bool) -> list[PlainResult]:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.rows == tuple(rows):
            chosen = ahead.chosen or _choose(rows, ahead.logits)
        else:
            if ahead is not None:
                for index, row in enumerate(ahead.rows):
                    row._logits = ahead.logits[index : index + 1]
            chosen = self._chosen_now(rows)
        if goes_ahead:
            chosen.launch()
            self._go_ahead(rows, chosen)
        results = chosen.read(rows)
        for row, result in zip(rows, results, strict=True):
            if (features := row.sequence.features) is not None and features.are_recorded:
                result.features = features.take(row.position)
            row.is_ahead = goes_ahead
            row.sequence.check(row.position + goes_ahead)
            if isinstance(result.token, int):
                fed = (*row.plan.feed, result.token) if goes_ahead else row.plan.feed
                result.fed = FeedPlan(row.plan.keep, fed)
        return results

    def _chosen_now(self, rows: Sequence[PlainRow]) -> _Chosen:
        """The next tokens: of texts that are ahead from their logits, of the others from a pass over them."""
        fed = [row for row in rows if not row.is_ahead]
        found = iter(self._model.feed_together([Feed(row.sequence, row.plan.feed, 1) for row in fed]) if fed else ())
        logits = [next(found) if row._logits is None or not row.is_ahead else row._logits for row in rows]
        for row in rows:
            row._logits = None
        if any(row.logits_pipeline.runs_user_code for row in rows):
            # So that user code is not blamed for a pass that fails.
            mx.eval(logits)
        return _choose(rows, logits[0] if len(logits) == 1 else mx.concatenate(logits))

    def _go_ahead(self, rows: Sequence[PlainRow], chosen: _Chosen) -> None:
        logits = self._model.feed_ahead([row.sequence for row in rows], chosen.tokens)
        if any(row.logits_pipeline.runs_user_code for row in rows):
            mx.async_eval(logits)
            self._ahead = _PassAhead(tuple(rows), logits, None)
        else:
            chosen_ahead = _choose(rows, logits, chosen.tokens)
            chosen_ahead.launch()
            self._ahead = _PassAhead(tuple(rows), logits, chosen_ahead)


def _choose(rows: Sequence[PlainRow], logits: mx.array, ahead: mx.array | None = None) -> _Chosen:
    """Choose the next token of each text; lazy, except that user code is called.

    Args:
        logits: (n, V).
        ahead: (n,) tokens that were fed after the rows' plans and gave these logits; None if there are none.
    """
    kinds = by_kind([row.logits_pipeline.kind for row in rows])
    own: dict[int, LogitCheck | OutriderError] = {}
    lazy_likelihoods = {}
    parts = []
    for kind, indices in kinds.items():
        some = logits if len(kinds) == 1 else logits[mx.array(indices)]
        if isinstance(kind, int):
            token, some, own[kind] = _choose_alone(rows[kind], some, None if ahead is None else ahead[kind : kind + 1])
        else:
            token = _choose_alike([rows[index] for index in indices], some, ahead is not None)
        parts.append(token.astype(mx.uint32))
        for i, index in enumerate(indices):
            if num_top := rows[index].opened.settings.logprobs:
                lazy_likelihoods[index] = LazyLikelihoods.of(some[i : i + 1], token[i : i + 1], num_top)
    tokens = parts[0]
    if len(kinds) > 1:
        order = [index for indices in kinds.values() for index in indices]
        tokens = mx.concatenate(parts)[mx.argsort(mx.array(order))]
    return _Chosen(tokens, mx.max(logits, axis=-1), own, lazy_likelihoods)


def _choose_alike(rows: Sequence[PlainRow], logits: mx.array, is_ahead: bool) -> mx.array:
    settings, pipeline = rows[0].opened.settings, rows[0].logits_pipeline
    decisions = [(row.opened.seed, row.position + is_ahead) for row in rows] if settings.temperature > 0 else []
    return choices_together(pipeline.filter(logits, 0), settings.rule, settings.temperature, decisions)


def _choose_alone(
    row: PlainRow, logits: mx.array, before: mx.array | None
) -> tuple[mx.array, mx.array, LogitCheck | OutriderError]:
    """The next token of a text (1,), its processed logits (1, V), and its logit check.

    If its processors fail: an arbitrary token, the logits as they are, and the error.
    """
    settings, pipeline, position = row.opened.settings, row.logits_pipeline, row.position
    if before is None:
        try:
            processed = pipeline.process(logits, row.history, position)
            filtered = pipeline.filter(processed, position)
            chosen = pipeline.sample(filtered, position)
        except OutriderError as error:
            return mx.zeros((1,), mx.uint32), logits, error
    else:
        processed, chosen = pipeline.process_lazily(logits, row.history, position, before), None
        position += 1
        filtered = pipeline.filter(processed, position)
    if chosen is None:
        chosen = choices_together(filtered, settings.rule, settings.temperature, [(row.opened.seed, position)])
    return chosen, processed, LogitCheck.of(logits, processed)
