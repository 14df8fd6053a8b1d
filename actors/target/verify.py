"""Verify passes, on the target's own thread: feed several texts at once, judge each proposal, and rewind the caches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import attrs
import mlx.core as mx

from actors.model import Model
from actors.sampling.logit_check import LogitCheck
from actors.sampling.logits_pipeline import by_kind
from actors.target.parts import Part
from protocol.acceptance import Judgement, LazyJudgements, judge, likelihoods
from protocol.errors import ProcessorError


def verify(model: Model, parts: Sequence[Part]) -> None:
    """Feed several texts in one forward pass, judge each proposal, and rewind the caches.

    If no token can be chosen from some row of logits, the tokens accepted before that row stand, as they would without
    a drafter.

    Each part has its result afterwards, or an error that concerns it alone: `NotANumberError` or `ProcessorError` if no
    token can be chosen from its first row.

    Raises: whatever the model raises: the pass has failed for all, and their caches are empty.
    """
    feeds, fed = [], []
    for part in parts:
        try:
            feeds.append(part.prepare())
            fed.append(part)
        except Exception as error:  # of any kind: it concerns this text alone
            part.error = error
    try:
        groups = _groups(fed, model.feed_together(feeds)) if fed else []
        mx.eval([array for group in groups for array in group.arrays()])
    except BaseException:
        # What is in the caches now is not known.
        model.abandon_shared()
        for part in parts:
            part.sequence.forget()
        raise
    for group in groups:
        group.finish()


def _groups(parts: Sequence[Part], logits: Sequence[mx.array]) -> list[_Group]:
    """Judge parts of one kind by one set of array operations, and others each by itself. Lazy, except for user code."""
    if any(part.session.shared.logits_pipeline.runs_user_code for part in parts):
        # User code is called with evaluated arrays, so that it is not blamed for a pass that fails.
        mx.eval(list(logits))
    groups = []
    for kind, indices in by_kind([part.session.shared.logits_pipeline.kind for part in parts]).items():
        alone = [index for index in indices if isinstance(kind, int)]
        if together := [index for index in indices if index not in alone]:
            groups.append(_judged_together([parts[i] for i in together], [logits[i] for i in together]))
        for index in alone:
            try:
                groups.append(_judged_alone(parts[index], logits[index]))
            except Exception as error:  # of any kind: user code is run here
                parts[index].error = error
    return groups


@attrs.frozen
class _Group:
    """Parts that are judged together.

    Attributes:
        parts: in the order of their rows.
        processed: (R, V) logits.
        logit_check: of these rows.
        judgements: of the parts.
    """

    parts: Sequence[Part]
    processed: mx.array
    logit_check: LogitCheck
    judgements: LazyJudgements

    def arrays(self) -> list[mx.array]:
        """What `finish` reads."""
        features = [part.sequence.features for part in self.parts]
        recorded = [array for each in features if each is not None for array in each.arrays()]
        return [*self.judgements.arrays, *self.logit_check.arrays(), *recorded]

    def finish(self) -> None:
        """Read the judgements, and rewind the caches."""
        soundness = self.logit_check.are_sound()
        begin = 0
        for part, judgement in zip(self.parts, self.judgements.read(), strict=True):
            assert part.feed is not None
            end = min(begin + part.feed.num_logits, len(soundness))
            num_sound = next((i for i, sound in enumerate(soundness[begin:end]) if not sound), end - begin)
            try:
                if num_sound == 0:
                    self.logit_check.check(begin, part.proposal.start, "target")
                _finish(part, judgement, num_sound, self.processed, slice(begin, end))
            except Exception as error:  # of any kind: it concerns this text alone
                part.error = error
            begin = end


def _judged_together(parts: Sequence[Part], logits: Sequence[mx.array]) -> _Group:
    """Judge parts that run no user code, so that an error raised here is a failure of the pass."""
    rows = logits[0] if len(logits) == 1 else mx.concatenate(list(logits))
    shared = parts[0].session.shared
    settings = shared.opened.settings
    filtered = shared.logits_pipeline.filter(rows, 0)
    logit_check, proposed = LogitCheck.of(rows, rows), [part.proposed_rows for part in parts]
    judgements = judge(filtered, proposed, settings.rule, settings.temperature)
    return _Group(parts, rows, logit_check, judgements)


def _judged_alone(part: Part, logits: mx.array) -> _Group:
    """Judge one part. User code may fail at a row because of drafted tokens before it, so rows are left out from the
    end until it succeeds. Tokens before those rows are judged, so that none is left out because of which token it is.
    """
    for num_rows in range(logits.shape[0], 1, -1):
        with suppress(ProcessorError):
            return _processed(part, logits[:num_rows])
    return _processed(part, logits[:1])


def _processed(part: Part, logits: mx.array) -> _Group:
    shared, start = part.session.shared, part.proposal.start
    settings, pipeline = shared.opened.settings, shared.logits_pipeline
    processed = pipeline.process(logits, part.history, start)
    logit_check = LogitCheck.of(logits, processed)
    num_rows = processed.shape[0]
    filtered = pipeline.filter(processed, start)
    chosen = pipeline.sample(filtered, start) if settings.rule == "match" else None
    proposed = part.proposed_rows
    drafted, probs = part.drafted[:num_rows], proposed.draft_probs[:num_rows]
    proposed = attrs.evolve(proposed, num_rows=num_rows, drafted=drafted, draft_probs=probs)
    judgements = judge(filtered, [proposed], settings.rule, settings.temperature, chosen=chosen)
    return _Group([part], processed, logit_check, judgements)


def _finish(part: Part, judgement: Judgement, num_sound: int, processed: mx.array, rows: slice) -> None:
    if judgement.num_accepted + (judgement.token is not None) > num_sound:
        judgement = Judgement(num_sound, None)
    start, num_accepted, token = part.proposal.start, judgement.num_accepted, judgement.token
    # Without a row that gives the next token, the next round feeds the last accepted token again.
    num_fed = num_accepted - (token is None)
    if part.single_step:
        num_fed = 0
    tokens = part.drafted[:num_accepted] + (() if token is None else (token,))
    part.drafted = part.drafted[: rows.stop - rows.start]
    part.num_accepted, part.token = num_accepted, token
    if num_top := part.session.shared.opened.settings.logprobs:
        part.likelihoods = likelihoods(processed[rows], tokens, num_top)
    # Before the rewind: a rewind to a checkpoint also drops accepted tokens, which the next pass replays.
    features = part.sequence.features
    part.features = None if features is None else features.take(start + num_fed)
    part.length = part.sequence.rewind(start + num_fed)
    part.sequence.check(part.length)
