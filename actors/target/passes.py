"""The target's passes, on its model's thread: rows that feed tokens in one forward pass, and are judged by kind.

A row feeds the committed tokens that its cache lacks, and the drafted tokens of a proposal if there are any. Rows of
one kind (`LogitsPipeline.kind`) are judged by one set of array operations, the others each by itself.

A pass of rows without drafted tokens may launch the next one before its tokens are read back from the device. So
building its graph, and the tokens' way through the event loop, cost nothing while the device computes. The cache of a
row that is *ahead* has its last committed token already; the row is judged by the logits after that token before it
takes part in any other pass. User code needs evaluated logits, so it is called only in the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import attrs
import mlx.core as mx

from actors.model import CachedSequence, CacheLostError, Feed, Model, RewindMode
from actors.sampling.logits_pipeline import NO_HISTORY, LogitCheck, LogitsPipeline, TokenHistory, by_kind
from actors.workers.worker import Step
from protocol.acceptance import Judgement, LazyJudgements, LazyLikelihoods, ProposedRows, judge, likelihoods
from protocol.cached_tokens import FeedPlan
from protocol.errors import ProcessorError
from protocol.messages import Features, Likelihood, Open, Proposal
from protocol.trace import Share

NOTHING_FED = FeedPlan(0, ())


@attrs.define(eq=False)
class Row:
    """One sequence in the passes of its model."""

    sequence: CachedSequence  # its cache
    opened: Open  # the message that began its session
    logits_pipeline: LogitsPipeline  # of its session
    # Set before each pass.
    plan: FeedPlan = NOTHING_FED  # brings the cache in line with the committed text; feeds nothing while it is ahead
    proposal: Proposal | None = None  # the drafted tokens to judge
    history: TokenHistory = NO_HISTORY  # of the committed text and the proposal
    settle: bool = False  # whether only committed tokens are fed; see `ReplayDebt`
    alone: bool = False  # whether the row must have a pass to itself, after one that it shared has failed
    # Set by the pass.
    drafted: tuple[int, ...] = ()  # the drafted tokens that are judged
    single_step: bool = False  # whether, although there are some, only committed tokens are fed
    is_ahead: bool = False  # whether a pass launched ahead has fed the last committed token
    # (1, V) logits of a pass ahead after which the next pass had other rows; the row is judged by them.
    kept_logits: mx.array | None = None

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.plan.keep + len(self.plan.feed)

    @property
    def proposed(self) -> tuple[int, ...]:
        """The drafted tokens of the proposal."""
        return () if self.proposal is None else self.proposal.tokens

    @property
    def feeds_drafted(self) -> bool:
        """Whether drafted tokens are fed, provided that the cache can drop them again."""
        return bool(self.proposed) and not self.settle

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pass feeds; 1 for one that was launched ahead."""
        return max(1, len(self.plan.feed)) + len(self.fed_drafted)

    @property
    def fed_drafted(self) -> tuple[int, ...]:
        """The drafted tokens that the pass feeds."""
        return () if self.single_step else self.drafted

    def prepare(self) -> Feed | None:
        """Decide what is fed; None if nothing is, since the row is ahead.

        With `settle`, or if drafted tokens could not be undone (`RewindMode.SINGLE`), they are not fed: the pass
        predicts one token, and the first drafted token is compared with it.

        Raises: CacheLostError: a pass that the sequence shared has failed since this one was planned.
        """
        self.drafted, self.single_step = self.proposed, False
        if self.sequence.length != self.plan.keep:
            self.lose()
            raise CacheLostError
        if self.is_ahead:
            return None
        if self.drafted:
            num_tokens = len(self.plan.feed) + len(self.drafted)
            if self.settle or self.sequence.prepare(num_tokens, self.position) is RewindMode.SINGLE:
                self.drafted, self.single_step = self.drafted[:1], True
        return Feed(self.sequence, self.plan.feed + self.fed_drafted, 1 + len(self.fed_drafted), self.alone)

    def lose(self) -> None:
        """Forget the pass ahead, after a pass has failed."""
        self.is_ahead, self.kept_logits = False, None

    def to_judge(self, num_rows: int, *, is_ahead: bool = False) -> ProposedRows:
        """What is to be judged by `num_rows` rows of logits, at the next position, or at the one after it."""
        start = self.position + is_ahead
        if self.proposal is None:
            return ProposedRows(self.opened.seed, start, num_rows)
        drafted = self.drafted[:num_rows]
        return ProposedRows(self.opened.seed, start, num_rows, drafted, self.proposal.probs[: len(drafted)])


@attrs.define
class RowResult:
    """What a pass has found for one row."""

    # The error that concerns this row alone, and then nothing else is set: `NotANumberError` or `ProcessorError` if no
    # token can be chosen, `CacheLostError` if a pass that the sequence shared has failed since this one was planned.
    error: Exception | None = None
    num_accepted: int = 0  # see `Judgement`
    token: int | None = None  # likewise
    num_judged: int = 0  # how many drafted tokens were judged
    fed: FeedPlan = NOTHING_FED  # the feed that the cache has carried out
    length: int = 0  # number of cached tokens after the rewind that followed
    single_step: bool = False  # whether only committed tokens were fed, although there were drafted ones
    likelihoods: tuple[Likelihood, ...] = ()  # of what is accepted and the next token, if the session asks
    features: Features | None = None  # of the tokens that were fed and accepted, if they are recorded


@attrs.frozen
class _Judged:
    """Rows of one kind that are judged together, or one row by itself; lazy."""

    rows: Sequence[Row]  # in the order of their logits
    counts: Sequence[int]  # rows of logits of each
    processed: mx.array  # (R, V) logits
    check: LogitCheck  # of these logits
    judgements: LazyJudgements  # of the rows
    arrays: list[mx.array]  # that `results` reads
    # Of the next tokens of rows without drafted tokens, if the session asks for them.
    likelihoods: dict[Row, LazyLikelihoods] = attrs.field(factory=dict)

    def results(self, *, goes_ahead: bool) -> dict[Row, RowResult]:
        """Read the judgements, and rewind the caches, unless they have gone ahead."""
        soundness, begin, found = self.check.are_sound(), 0, {}
        are_sound = all(soundness)
        for row, count, judgement in zip(self.rows, self.counts, self.judgements.read(), strict=True):
            end = begin + count
            num_sound = count if are_sound else [*soundness[begin:end], False].index(False)
            try:
                if num_sound == 0:
                    self.check.check(begin, row.position, "target")
                found[row] = self._result(row, judgement, num_sound, slice(begin, end), goes_ahead=goes_ahead)
            except Exception as error:  # of any kind: it concerns this row alone
                found[row] = RowResult(error)
            begin = end
        return found

    def _result(self, row: Row, judgement: Judgement, num_sound: int, rows: slice, *, goes_ahead: bool) -> RowResult:
        """What is accepted before a row of logits from which no token can be chosen stands, as without a drafter."""
        num_accepted, token = judgement.num_accepted, judgement.token
        if num_accepted + (token is not None) > num_sound:
            num_accepted, token = num_sound, None
        # Without a row that gives the next token, the next round feeds the last accepted token again.
        length = row.position + (0 if row.single_step else num_accepted - (token is None))
        found = RowResult(None, num_accepted, token, min(len(row.drafted), rows.stop - rows.start))
        found.single_step = row.single_step
        if num_top := row.opened.settings.logprobs:
            lazy, tokens = self.likelihoods.get(row), row.drafted[:num_accepted] + (() if token is None else (token,))
            found.likelihoods = likelihoods(self.processed[rows], tokens, num_top) if lazy is None else lazy.read()
        # Before the rewind: a rewind to a checkpoint also drops accepted tokens, which the next pass replays.
        if (features := row.sequence.features) is not None:
            found.features = features.take(length)
        if goes_ahead and token is not None:
            found.fed, length = FeedPlan(row.plan.keep, (*row.plan.feed, token)), length + 1
        else:
            found.fed = FeedPlan(row.plan.keep, row.plan.feed + row.fed_drafted)
            if row.drafted:
                length = row.sequence.rewind(length)
        row.sequence.check(length)
        found.length = length
        return found


@attrs.frozen
class _PassAhead:
    """A pass over the next tokens of some rows, launched before anybody has asked for it."""

    rows: tuple[Row, ...]  # that it feeds
    logits: mx.array  # (n, V) after these tokens; lazy
    judged: list[_Judged] | None  # the rows judged by them; None if the next step judges


class Passes:
    """The passes of one model, one after the other."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._ahead: _PassAhead | None = None

    def steps(
        self, rows: Sequence[Row], shares: Sequence[Share], num_passes: int, *, goes_ahead: bool
    ) -> Step[list[RowResult]]:
        """Run a pass in each step, fewer if a text ends or a row fails; `shares` are the rows' parts in the first.

        If `num_passes` is more than 1, or each row `goes_ahead` with one more token after these, no row may have
        drafted tokens, nor in passes in a row processors that depend on its tokens.
        """
        results = self._pass(rows, goes_ahead=goes_ahead or num_passes > 1)
        if num_passes == 1 or any(
            result.error is not None or result.token in row.opened.stop_tokens
            for row, result in zip(rows, results, strict=True)
        ):
            return Step(results)
        for row in rows:
            row.plan = FeedPlan(row.position + 1, ())
        shares = tuple([Share(share.session, share.round + 1, 1) for share in shares])
        following = partial(self.steps, rows, shares, num_passes - 1, goes_ahead=goes_ahead)
        return Step(results, following, len(rows), shares if len(shares) > 1 else ())

    def _pass(self, rows: Sequence[Row], *, goes_ahead: bool) -> list[RowResult]:
        """Rows that take no part stay ahead. Raises: whatever the model raises; then the rows' caches are empty."""
        results: dict[Row, RowResult] = {}
        feeds: dict[Row, Feed | None] = {}
        for row in rows:
            try:
                feeds[row] = row.prepare()
            except Exception as error:  # of any kind: it concerns this row alone
                results[row] = RowResult(error)
        try:
            if feeds:
                results |= self._launched_and_read(feeds, goes_ahead)
        except BaseException:
            # What is in the caches now is not known.
            self._ahead = None
            self._model.abandon_shared()
            for row in rows:
                row.sequence.forget()
                row.lose()
            raise
        return [results[row] for row in rows]

    def _launched_and_read(self, feeds: dict[Row, Feed | None], goes_ahead: bool) -> dict[Row, RowResult]:
        rows, results = tuple(feeds), dict[Row, RowResult]()
        judged = self._launch(feeds, results)
        arrays = [array for each in judged for array in each.arrays]
        for row in rows:
            if (features := row.sequence.features) is not None:
                arrays += features.arrays()
        goes_ahead = goes_ahead and not results  # a row that failed has no token to go on with
        if goes_ahead:
            mx.async_eval(*arrays)
            self._go_ahead(rows, judged)
        mx.eval(*arrays)
        for each in judged:
            results |= each.results(goes_ahead=goes_ahead)
        for row in rows:
            row.is_ahead = goes_ahead
        return results

    def _launch(self, feeds: dict[Row, Feed | None], failed: dict[Row, RowResult]) -> list[_Judged]:
        rows, ahead = tuple(feeds), self._ahead
        self._ahead = None
        if ahead is not None and ahead.rows == rows:
            return ahead.judged or _judge(rows, [1] * len(rows), ahead.logits, failed)
        if ahead is not None:
            for index, row in enumerate(ahead.rows):
                row.kept_logits = ahead.logits[index : index + 1]
        fed = [feed for feed in feeds.values() if feed is not None]
        fresh = iter(self._model.feed_together(fed) if fed else ())
        logits = []
        for row, feed in feeds.items():
            kept, row.kept_logits = row.kept_logits, None
            logits.append(next(fresh) if feed is not None or kept is None else kept)
        if any(row.logits_pipeline.runs_user_code for row in rows):
            # So that user code is not blamed for a pass that fails.
            mx.eval(logits)
        counts = [each.shape[0] for each in logits]
        return _judge(rows, counts, logits[0] if len(logits) == 1 else mx.concatenate(logits), failed)

    def _go_ahead(self, rows: tuple[Row, ...], judged: Sequence[_Judged]) -> None:
        tokens = judged[0].judgements.tokens
        if len(judged) > 1:
            order = {row: index for index, row in enumerate([row for each in judged for row in each.rows])}
            tokens = mx.concatenate([each.judgements.tokens for each in judged])[mx.array([order[row] for row in rows])]
        tokens = tokens.astype(mx.uint32)
        logits = self._model.feed_ahead([row.sequence for row in rows], tokens)
        if any(row.logits_pipeline.runs_user_code for row in rows):
            mx.async_eval(logits)
            self._ahead = _PassAhead(rows, logits, None)
            return
        judged_ahead = _judge(rows, [1] * len(rows), logits, {}, tokens)
        mx.async_eval(*[array for each in judged_ahead for array in each.arrays])
        self._ahead = _PassAhead(rows, logits, judged_ahead)


def _judge(
    rows: Sequence[Row],
    counts: Sequence[int],
    logits: mx.array,
    failed: dict[Row, RowResult],
    before: mx.array | None = None,
) -> list[_Judged]:
    """Judge rows, by `counts` of (R, V) logits each; lazy, but for user code, whose failures go to `failed`.

    `before` are (n,) tokens that were fed after the rows' plans, if there were any.
    """
    kinds = by_kind([row.logits_pipeline.kind for row in rows])
    judged = []
    for kind, indices in kinds.items():
        some = logits if len(kinds) == 1 else _of_rows(logits, counts, indices)
        if not isinstance(kind, int):
            alike = rows if len(kinds) == 1 else [rows[i] for i in indices]
            judged.append(_judged_together(alike, [counts[i] for i in indices], some, before))
            continue
        try:
            judged.append(_judged_alone(rows[kind], some, None if before is None else before[kind : kind + 1]))
        except Exception as error:  # of any kind: user code is run here
            failed[rows[kind]] = RowResult(error)
    return judged


def _of_rows(logits: mx.array, counts: Sequence[int], indices: Sequence[int]) -> mx.array:
    begins = list(accumulate(counts, initial=0))
    return logits[mx.array([begins[index] + i for index in indices for i in range(counts[index])])]


def _judged_together(
    rows: Sequence[Row], counts: Sequence[int], logits: mx.array, before: mx.array | None = None
) -> _Judged:
    """Judge rows of one kind, or a row by itself. Where no user code is run, an error is a failure of the pass."""
    proposed = [row.to_judge(count, is_ahead=before is not None) for row, count in zip(rows, counts, strict=True)]
    settings, pipeline, position = rows[0].opened.settings, rows[0].logits_pipeline, proposed[0].start
    processed = pipeline.process(logits, rows[0].history, position, before)
    filtered = pipeline.filter(processed, position)
    chosen = pipeline.sample(filtered, position)
    judgements = judge(filtered, proposed, pipeline.rule, settings.temperature, chosen=chosen)
    check = LogitCheck.of(logits, processed)
    judged = _Judged(rows, counts, processed, check, judgements, [*judgements.arrays, *check.arrays])
    for i, row in enumerate(rows):
        if (num_top := row.opened.settings.logprobs) and len(processed) == len(rows) and not row.drafted:
            own = slice(i, i + 1)
            judged.likelihoods[row] = lazy = LazyLikelihoods.of(processed[own], judgements.tokens[own], num_top)
            judged.arrays.extend(lazy.arrays())
    return judged


def _judged_alone(row: Row, logits: mx.array, before: mx.array | None) -> _Judged:
    """Judge one row. User code may fail at a row of logits because of drafted tokens before it, so rows are left out
    from the end until it succeeds. Tokens before those rows are judged, so that none is left out because of which token
    it is.
    """
    num_rows = logits.shape[0]
    while True:
        try:
            return _judged_together([row], [num_rows], logits[:num_rows], before)
        except ProcessorError:
            if num_rows == 1:
                raise
        num_rows -= 1
