"""A draft budget: the policy's decisions about the next draft steps, made in advance.

Asking the policy after each step costs a trip from the model thread to the event loop and back, during which nobody
drafts. So the policy hands out its decision as a function of the drafter's confidence, and the model thread applies it.
Where a decision cannot be told in advance, the budget ends, and the drafter asks.

A budget sees how confident the drafter was in a step, never which token it drew (see `protocol.lookahead_policy`).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from protocol.lookahead_tree import Guess


@attrs.frozen
class StepWorth:
    """Whether a draft step beside the target is worth its time: the rule *work ahead or rest*."""

    step_s: float  # seconds that the step takes beside the target
    saved_step_s: float  # seconds that the same step would take later, while the target waits
    target_delay_s: float  # seconds by which the step delays the target
    verdict_due_s: float  # when the verdict is expected, in seconds on the actors' clock

    def __call__(self, reach: float, now_s: float) -> bool:
        """Whether to draft after a node with this reach, beginning now."""
        overrun_s = min(self.step_s, max(0.0, now_s + self.step_s - self.verdict_due_s))
        return reach * self.saved_step_s > self.target_delay_s + (1.0 - reach) * overrun_s


@attrs.frozen
class DraftBudget:
    """Permission to go on drafting after the drafter's own choices, once the draft step under way is done."""

    max_steps: int  # how many more steps may follow, >= 0
    reach: float = 1.0  # of the node that is being drafted after, in [0, 1]
    # For each of the steps that may follow, the reach at which, or below which, the drafter asks instead; the last one
    # holds for all further steps.
    min_reaches: tuple[float, ...] = (0.0,)
    # The greatest reach among the other nodes that could be drafted after, per time of a step of width 1. While the
    # target works, the next step must beat it.
    best_other_reach: float = 0.0
    # The test that a step must pass while the target works; None where the target waits for the drafter.
    step_worth: StepWorth | None = None
    # (kind of copy, raw confidence, staleness) → probability that the guess is right; None to ignore reach.
    calibrate: Callable[[int | None, float, int], float] | None = None
    mean_acceptance: float = 1.0  # what to expect of a choice that is not known yet, in [0, 1]

    def after(self, guess: Guess, now_s: float) -> DraftBudget | None:
        """The budget that is left after a step, by its guess; None if the drafter must ask."""
        confidence = 1.0 if self.calibrate is None else self.calibrate(guess.copy_kind, guess.raw, guess.staleness)
        return self._after(confidence, now_s)

    def foresees_another(self, now_s: float) -> bool:
        """Whether a step is likely to follow the one that is under way."""
        return self._after(self.mean_acceptance, now_s) is not None

    def _after(self, confidence: float, now_s: float) -> DraftBudget | None:
        reach = self.reach * confidence
        if self.max_steps <= 0 or reach <= self.min_reaches[0]:
            return None
        if self.step_worth is not None and (reach <= self.best_other_reach or not self.step_worth(reach, now_s)):
            return None
        return attrs.evolve(
            self, max_steps=self.max_steps - 1, reach=reach, min_reaches=self.min_reaches[1:] or self.min_reaches
        )


EMPTY_BUDGET = DraftBudget(0)  # the drafter asks after each step
