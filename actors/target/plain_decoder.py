"""Decoding one text without a drafter, one forward pass ahead; on the target's own thread."""

from __future__ import annotations

from typing import cast

import attrs
import mlx.core as mx

from actors.model import CachedSequence, CacheLostError
from actors.sampling.logit_check import LogitCheck
from actors.sampling.logits_pipeline import LogitsPipeline, TokenHistory
from protocol.acceptance import choices_together, likelihoods
from protocol.cached_tokens import FeedPlan
from protocol.messages import Features, Likelihood, Open

# A token, its likelihood if the session asks for it, and the features of what was read.
Decoded = tuple[int, tuple[Likelihood, ...], Features | None]


@attrs.frozen
class _PendingToken:
    """A token that is being computed.

    Attributes:
        token: (1,) id.
        logits: (1, V) processed logits that the token is chosen from.
        logit_check: of that row.
    """

    token: mx.array
    logits: mx.array
    logit_check: LogitCheck

    def launch(self) -> None:
        mx.async_eval(self.token, *self.logit_check.arrays())


class PlainDecoder:
    """Decoding without a drafter, one forward pass ahead of the token that is read.

    The next pass is launched before the token that it starts from is read back. So building its graph and the way
    through trio cost nothing while the device computes. A user's processor or sampler is called with evaluated arrays;
    with one, only the pass is launched ahead, and its token is chosen in the next step.
    """

    def __init__(self, sequence: CachedSequence, opened: Open, logits_pipeline: LogitsPipeline) -> None:
        self._sequence = sequence
        self._opened = opened
        self._logits_pipeline = logits_pipeline
        # Of the pass that was launched ahead: the next token, not read; or the model's logits (1, V) alone.
        self._pending: _PendingToken | None = None
        self._pending_rows: mx.array | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the cache already processes the last token that was returned."""
        return self._pending is not None or self._pending_rows is not None

    def step(self, plan: FeedPlan, history: TokenHistory, position: int, go_ahead: bool) -> Decoded:
        """The token at a position.

        Args:
            plan: how to bring the cache in line with the text; empty while the decoder is ahead.
            history: of the text before the token.
            position: absolute, of the token wanted.
            go_ahead: whether a token after it will be wanted.

        Raises:
            NotANumberError, ProcessorError: no token can be chosen.
            CacheLostError: a pass that the text shared has failed since the round was planned.
        """
        if self._sequence.length != plan.keep:
            self._pending = self._pending_rows = None
            raise CacheLostError
        current, self._pending = self._pending, None
        if current is None:
            rows, self._pending_rows = self._pending_rows, None
            if rows is None:
                rows = self._sequence.feed(plan.feed, 1)
                assert rows is not None
            current = self._choose(rows, self._logits_pipeline.process(rows, history, position), position)
        current.launch()
        if go_ahead:
            rows = self._sequence.feed_lazy(current.token)
            if self._logits_pipeline.runs_user_code:
                self._pending_rows = rows
                mx.async_eval(rows)
            else:
                processed = self._logits_pipeline.process_lazily(rows, history, position, current.token)
                self._pending = self._choose(rows, processed, position + 1)
                self._pending.launch()
        self._sequence.check(plan.keep + len(plan.feed) + (1 if go_ahead else 0))
        token = cast(int, current.token.item())
        current.logit_check.check(0, position, "target")
        features = self._sequence.take_features(plan.keep + len(plan.feed))
        return token, likelihoods(current.logits, (token,), self._opened.settings.logprobs), features

    def _choose(self, rows: mx.array, logits: mx.array, position: int) -> _PendingToken:
        """The token chosen from processed logits (1, V), lazy; `rows` are the model's own logits."""
        settings, seed = self._opened.settings, self._opened.seed
        filtered = self._logits_pipeline.filter(logits, position)
        if (token := self._logits_pipeline.sample(filtered)) is None:
            token = choices_together(filtered, settings.rule, settings.temperature, [(seed, position)])
        return _PendingToken(token, logits, LogitCheck.of(rows, logits))
