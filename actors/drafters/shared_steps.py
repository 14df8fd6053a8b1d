"""The draft steps of several sessions: one forward pass over all that take part, each until its budget is spent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import attrs
import mlx.core as mx
import outcome

from actors.drafters.draft_steps import Drafted, DraftInput, DraftSteps, LazyGuesses, guesses_together
from actors.model import Feed, Model, feed_each
from actors.sampling.logits_pipeline import by_kind
from actors.workers.worker import Job, Step
from protocol.lookahead_tree import Guess, Node
from protocol.session_state import SessionPhase
from protocol.trace import Share


@attrs.define(eq=False)
class DraftPart:
    """One session's part in draft steps."""

    session: int  # its id
    draft_steps: DraftSteps  # the steps of this session
    start: DraftInput  # the input of the next step. Read and written on the worker's thread once the steps have begun.
    decided_in: tuple[int, SessionPhase]  # the round of the session and its phase when the policy gave the draft budget
    alone: bool = False  # whether it has its passes to itself, and its cache stays apart from those of others
    node: Node | None = None  # the node that is being drafted after; None if its result is not wanted any more
    round: int = 0  # of the session, for the trace
    expected_end_s: float = 0.0  # when the running step is expected to end, in seconds on the worker's clock
    overlaps_target: bool = False  # whether the target was working when the running step began
    # Whether it ends after the running step. May be set in trio's thread at any time.
    is_interrupted: bool = attrs.field(default=False, init=False)

    @property
    def share(self) -> Share:
        """Its part in the next step."""
        return Share(self.session, self.round, len(self.start.plan.feed))


@attrs.frozen
class PartResult:
    """The result of a step for one session."""

    part: DraftPart
    outcome: outcome.Outcome[Drafted]  # of the step, or the error that concerns this session alone
    continues: bool  # whether it takes part in the next step, if there is one


PartResults = list[PartResult]


class SharedSteps:
    """The draft steps of one draft model."""

    def __init__(self, model: Model, max_batch: int) -> None:
        # Most sessions in one step; 1 once it is known that the model's cached sequences cannot share passes.
        self.num_shared = max_batch
        self._model = model

    def by_itself(self, part: DraftPart) -> Step[PartResults]:
        """Draft one token for a session whose cache is its own."""
        return self._of_one(part, part.draft_steps.begin(part.start))

    def _of_one(self, part: DraftPart, step: Step[Drafted]) -> Step[PartResults]:
        results = [PartResult(part, outcome.Value(step.result), step.next_call is not None)]
        if (next_call := step.next_call) is None:
            return Step(results)
        return Step(results, lambda: self._of_one(part, next_call()), step.num_tokens)

    def together(self, parts: Sequence[DraftPart]) -> Step[PartResults]:
        """Draft one token for each session. Raises: whatever their pass raises."""
        prepared = {part: outcome.capture(part.draft_steps.prepare, part.start.plan) for part in parts}
        guesses = self._guesses(
            [each for each, found in prepared.items() if isinstance(found, outcome.Value) and found.value is None]
        )
        results: PartResults = []
        for part, hindrance in prepared.items():
            if part not in guesses:
                results.append(PartResult(part, cast("outcome.Outcome[Drafted]", hindrance), False))
                continue
            concluded = outcome.capture(_conclude, part, guesses[part])
            if isinstance(concluded, outcome.Error):
                results.append(PartResult(part, concluded, False))
                continue
            drafted, following = concluded.unwrap()
            continues = following is not None and not part.is_interrupted
            part.start = following or part.start
            results.append(PartResult(part, outcome.Value(drafted), continues))
        going_on = [result.part for result in results if result.continues]
        if not going_on:
            return Step(results)
        shares = tuple(part.share for part in going_on)
        return Step(results, partial(self.together, going_on), sum(share.num_tokens for share in shares), shares)

    def _guesses(self, parts: Sequence[DraftPart]) -> dict[DraftPart, outcome.Outcome[Guess]]:
        if not parts:
            return {}
        try:
            feeds = [Feed(part.draft_steps.sequence, part.start.plan.feed, 1, part.alone) for part in parts]
            logits = self._model.feed_together(feeds) if self._can_share(len(feeds)) else feed_each(feeds)
            if any(part.draft_steps.shared.logits_pipeline.runs_user_code for part in parts):
                # User code is called with evaluated arrays, so that it is not blamed for a pass that fails.
                mx.eval(logits)
            lazies = _lazies(parts, logits)
            mx.eval([lazy.value.arrays() for _, lazy in lazies if isinstance(lazy, outcome.Value)])
        except BaseException:
            # What is in the caches is not known. No token that was drawn was used, so drawing again does not bias the
            # texts.
            self._model.abandon_shared()
            for part in parts:
                part.draft_steps.sequence.forget()
            raise
        guesses: dict[DraftPart, outcome.Outcome[Guess]] = {}
        for together, lazy in lazies:
            guesses.update(zip(together, _read(together, lazy), strict=True))
        return guesses

    def _can_share(self, num_sessions: int) -> bool:
        if num_sessions > 1 and self.num_shared > 1 and self._model.sharing_obstacle(rewinds_passes=True) is not None:
            self.num_shared = 1
        return self.num_shared > 1


def _lazies(
    parts: Sequence[DraftPart], logits: Sequence[mx.array]
) -> list[tuple[list[DraftPart], outcome.Outcome[LazyGuesses]]]:
    """The guesses of sessions of one kind by one set of array operations, and those of others each by itself."""
    lazies: list[tuple[list[DraftPart], outcome.Outcome[LazyGuesses]]] = []
    for kind, indices in by_kind([part.draft_steps.kind for part in parts]).items():
        together, rows = [parts[index] for index in indices], [logits[index] for index in indices]
        steps, positions = [part.draft_steps for part in together], [part.start.position for part in together]
        start = together[0].start
        guesses = partial(guesses_together, steps, rows, positions, start.trail, start.history)
        lazies.append((together, outcome.capture(guesses) if isinstance(kind, int) else outcome.Value(guesses())))
    return lazies


def _read(parts: Sequence[DraftPart], found: outcome.Outcome[LazyGuesses]) -> Iterator[outcome.Outcome[Guess]]:
    if isinstance(found, outcome.Error):  # of a session by itself
        yield found
        return
    lazy = found.unwrap()
    for row, (part, guess) in enumerate(zip(parts, lazy.read(), strict=True)):
        checked = outcome.capture(lazy.logit_check.check, row, part.start.position, "draft")
        yield outcome.Value(guess) if isinstance(checked, outcome.Value) else checked


def _conclude(part: DraftPart, guess: outcome.Outcome[Guess]) -> tuple[Drafted, DraftInput | None]:
    return part.draft_steps.conclude(part.start, guess.unwrap())


def num_rows(job: Job[Any]) -> int:
    """Rows that a step computes: as many for each session as for the widest, because the others are padded."""
    return len(job.shares) * max(share.num_tokens for share in job.shares) if job.shares else job.num_tokens
