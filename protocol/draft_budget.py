"""How far the drafter may go on by itself, down its own choices, before it asks again.

To ask after each step costs the way to the policy and back, while nobody drafts. Of most of what the policy would say,
all is known beforehand but how sure the drafter will have been. So it gives a leash: what it would say, as a function
of that. Where that cannot be told, the leash ends and the drafter asks, which costs no more than it always did.

A leash knows of a step what a policy may know: how sure the drafter was, never what it drew (see
`protocol.lookahead_policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from protocol.lookahead_tree import Guess


@attrs.frozen
class StepWorth:
    """*Work ahead or rest*: whether a step is worth its time, beside the target.

    Attributes:
        step: seconds that it takes.
        saved: seconds that it would take later, while the target waits.
        delay: seconds by which the target is late for each second of it.
        due: when the verdict is expected.
    """

    step: float
    saved: float
    delay: float
    due: float

    def __call__(self, reach: float, now: float) -> bool:
        """Whether it is, after a node with this reach."""
        overrun = min(self.step, max(0.0, now + self.step - self.due))
        return reach * self.saved > self.delay * self.step + (1.0 - reach) * overrun


@attrs.frozen
class DraftBudget:
    """Leave to go on after a draft step that is under way.

    Attributes:
        steps: how many more may follow, >= 0.
        reach: of the node that is drafted after.
        least: reach at or below which to ask.
        rival: of all else that could be drafted after, the greatest reach, in steps of width 1; a step must beat it.
        worth: beside the target, a step must be worth it; None where the target waits for the drafter.
        believe: the modelled probability of a guess, by its rank and the drafter's own confidence; None where
            reach does not matter.
        mean: what is to be expected of a choice that is not known yet.
    """

    steps: int
    reach: float = 1.0
    least: float = 0.0
    rival: float = 0.0
    worth: StepWorth | None = None
    believe: Callable[[int, float], float] | None = None
    mean: float = 1.0

    def after(self, guesses: Sequence[Guess], now: float) -> DraftBudget | None:
        """What is left of it after a step that has brought these, its own choice first; None to ask."""
        if self.believe is None:
            return self._after(1.0, (), now)
        choice, *others = (self.believe(guess.rank, guess.raw) for guess in guesses)
        return self._after(choice, others, now)

    def foresees_another(self, now: float) -> bool:
        """Whether a step is likely to follow the one that is under way."""
        return self._after(self.mean, (), now) is not None

    def _after(self, choice: float, others: Sequence[float], now: float) -> DraftBudget | None:
        reach = self.reach * choice
        rival = max(self.rival, self.reach * max(others, default=0.0))
        if self.steps <= 0 or reach <= self.least:
            return None
        if self.worth is not None and (reach <= rival or not self.worth(reach, now)):
            return None
        return attrs.evolve(self, steps=self.steps - 1, reach=reach, rival=rival)


NO_DRAFT_BUDGET = DraftBudget(0)
