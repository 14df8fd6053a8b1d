"""Lookahead policies: how far to draft ahead, when to send a proposal, and when not to speculate at all.

Unless the rule is match, a policy's decisions may depend on the text before a token, on the distribution that the token
was drawn from, and on time, but never on the drawn token itself. So `reach` is computed from what any draw may expect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import attrs

from protocol.lookahead_tree import Guess, LookaheadTree, Node
from protocol.prices import Prices

# --- draft budgets --------------------------------------------------------------------------------


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
    """The policy's decisions about the next draft steps, made in advance as a function of the drafter's confidence,
    never of a drawn token: asking after each step would cost a trip from the model thread to the event loop and back,
    during which nobody drafts. Where a decision cannot be told in advance, the drafter asks.
    """

    max_steps: int  # how many more steps may follow, >= 0
    reach: float = 1.0  # of the node that is being drafted after, in [0, 1]
    # For each step that may follow, the reach up to which the drafter asks instead; the last one holds for all further
    # ones.
    min_reaches: tuple[float, ...] = (0.0,)
    # The greatest reach to draft after elsewhere, per time of a step, which the next step beside the target must beat.
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


# --- policies -------------------------------------------------------------------------------------


@attrs.frozen
class PolicyView:
    """What a policy may look at."""

    tree: LookaheadTree  # the drafted tokens
    max_proposal: int  # the most tokens of use in one proposal, >= 0
    max_depth: int  # how many tokens beyond the root are of any use, >= 0
    can_expand: Callable[[Node], bool]  # whether anything may come after a node
    num_to_feed: Callable[[Node], int]  # how many tokens the drafter must feed in order to draft after a node
    now_s: float  # seconds on the actors' clock
    verdict_due_s: float | None = None  # when the verdict is expected; None on the drafter's turn
    drafting_node: Node | None = None  # the node that is being drafted after, or None
    drafting_until_s: float = 0.0  # when that step should end
    # Seconds for which the target has passes of other sessions to work on, >= 0: from now on, if it is the drafter's
    # turn; else from the verdict on, and inf where other sessions wait for the drafter.
    queue_slack_s: float = 0.0

    def growable(self) -> Node | None:
        """The end of the chain, if drafting after it would lengthen the proposal."""
        chain = self.tree.chain()
        end = chain[-1] if chain else self.tree.root
        return end if len(chain) < self.max_proposal and self.is_open(end) else None

    def is_open(self, node: Node) -> bool:
        """Whether it is of use to draft after a node."""
        return not node.is_expanded and self.tree.depth(node) < self.max_depth and self.can_expand(node)


class Policy(Protocol):
    """Decides for one session. Unless it says otherwise, there are no rests."""

    @property
    def works_ahead(self) -> bool:
        """Whether to draft while a verdict is due. Must not depend on what was drawn."""

    def proposal(self, view: PolicyView) -> list[Node] | None:
        """What to propose now, possibly nothing; None to wait for more. Called on the drafter's turn."""

    def expansion(self, view: PolicyView) -> Node | None:
        """The node to draft after next, or None; not asked while a verdict is due unless it works ahead."""

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        """How far to go on without asking, after the drafter's own choices, beyond a node that `expansion` returned."""

    def drafted(self, guess: Guess) -> Guess:
        """A drafter's guess with the confidence and the worth that the policy gives it."""
        return guess

    def copied(self, guesses: Iterable[Guess], *, then_drafts: bool) -> list[Guess]:
        """Likewise of a copy, as far as it might be proposed; `then_drafts`: a drafter may go on after it."""
        return list(guesses)

    def should_rest(self) -> bool:
        """Whether to leave some rounds to the target alone. Called when the drafter's turn begins."""
        return False

    def should_rest_on(self, num_behind: int, num_rounds: int) -> bool:
        """Whether to prolong a rest of `num_rounds`, near its end; else the drafter reads `num_behind` tokens first."""
        return False

    def should_catch_up(self, num_behind: int, num_generated: int) -> bool:
        """Whether to read `num_behind` tokens in a rest, `num_generated` of them new, to see what would be guessed."""
        return False


@attrs.frozen
class ChainPolicy(Policy):
    """A fixed lookahead over a single chain."""

    lookahead: int  # tokens in a proposal; a proposal is delayed until it has as many
    overlaps: bool = True  # whether to draft ahead while a verdict is due
    # Say whether drafting ahead pays; None to draft ahead without asking.
    prices: Prices | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def works_ahead(self) -> bool:
        return self.overlaps and (self.prices is None or self.prices.works_ahead(self.lookahead))

    def proposal(self, view: PolicyView) -> list[Node] | None:
        ready = view.tree.chain()[: min(self.lookahead, view.max_proposal)]
        return None if len(ready) < self.lookahead and view.growable() is not None else ready

    def expansion(self, view: PolicyView) -> Node | None:
        chain = view.tree.chain()
        end = chain[-1] if chain else view.tree.root
        return end if len(chain) < self._max_depth and view.is_open(end) else None

    @property
    def _max_depth(self) -> int:
        # A proposal, a guess at the token that the target puts after it, and the next proposal: if every guess is
        # right, the next proposal is ready when the verdict comes.
        return 2 * self.lookahead + 1

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        # On the drafter's turn, up to a proposal.
        max_depth = min(self.lookahead, view.max_proposal) if view.verdict_due_s is None else self._max_depth
        return DraftBudget(min(max_depth, view.max_depth) - view.tree.depth(node) - 1)
