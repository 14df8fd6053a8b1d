"""How far to draft ahead, and when to send: decisions over a lookahead tree.

Under the rejection rule a decision may depend on the text before a token, on the distribution that it was drawn
from and on time, never on the drawn token itself. So a proposal is made of the drafter's own draws alone, and
`reach` is there made of what a draw from that distribution may expect (see `actors.drafters.draft_actor`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol

import attrs

from protocol.calibration import Calibration
from protocol.draft_budget import NO_DRAFT_BUDGET, DraftBudget, StepWorth
from protocol.lookahead_tree import LookaheadTree, Node
from protocol.prices import Prices
from protocol.settings import MAX_LOOKAHEAD


@attrs.frozen
class View:
    """What a policy may look at.

    Attributes:
        tree: what is drafted.
        limit: most tokens that are of use in a proposal, >= 0.
        depth: how many tokens beyond the root are of use at all.
        can_expand: whether anything may come after a node.
        width: tokens that the drafter must feed to draft after a node.
        now: seconds on the actors' clock.
        due: when the verdict is expected; None where it is the drafter's turn.
        in_flight: the node that is being drafted after, or None.
        in_flight_until: when that is expected to be done.
        slack: seconds for which the target has passes of other sessions to go on with, >= 0. From now on, where it is
            the drafter's turn; else from the verdict on, and then inf where others wait for the drafter.
    """

    tree: LookaheadTree
    limit: int
    depth: int
    can_expand: Callable[[Node], bool]
    width: Callable[[Node], int]
    now: float
    due: float | None = None
    in_flight: Node | None = None
    in_flight_until: float = 0.0
    queue_slack_s: float = 0.0

    def growable(self) -> Node | None:
        """The end of the chain, if drafting after it would lengthen the proposal."""
        chain = self.tree.chain()
        end = chain[-1] if chain else self.tree.root
        return end if len(chain) < self.limit and self.is_open(end) else None

    def is_open(self, node: Node) -> bool:
        """Whether it is of use to draft after a node."""
        return not node.is_expanded and self.tree.depth(node) < self.depth and self.can_expand(node)


class Policy(Protocol):
    """Decides for one session."""

    @property
    def num_guesses(self) -> int:
        """How many tokens are wanted after a node: the drafter's choice, and runners-up."""
        ...

    def proposal(self, view: View) -> list[Node] | None:
        """What to propose now, maybe nothing; or None to wait for more. Asked on the drafter's turn."""
        ...

    def expansion(self, view: View) -> Node | None:
        """The node to draft after next, or None to do nothing until something changes."""
        ...

    def draft_budget(self, view: View, node: Node) -> DraftBudget:
        """How far to go on, down the drafter's own choices, after a node that `expansion` has said."""
        ...

    def should_rest(self) -> bool:
        """Whether to leave some rounds to the target alone. Asked when the drafter's turn begins."""
        ...

    def should_rest_on(self, num_behind: int) -> bool:
        """Whether to leave it some more. Asked shortly before a rest ends; if not, speculating begins anew.

        Args:
            num_behind: tokens that the drafter will have to read first.
        """
        ...

    def should_catch_up(self, num_tokens: int) -> bool:
        """Whether to read, in a rest, the tokens that were committed meanwhile, and see which were guessed right."""
        ...


@attrs.frozen
class ChainPolicy:
    """A fixed lookahead over a single chain.

    Attributes:
        most: tokens in a proposal, and for which a proposal is worth waiting.
        overlaps: whether to draft ahead while a verdict is due.
    """

    most: int
    overlaps: bool = True
    num_guesses: int = 1

    def proposal(self, view: View) -> list[Node] | None:
        """See `Policy.proposal`."""
        ready = view.tree.chain()[: min(self.most, view.limit)]
        return None if len(ready) < self.most and view.growable() is not None else ready

    def expansion(self, view: View) -> Node | None:
        """See `Policy.expansion`."""
        if view.due is not None and not self.overlaps:
            return None
        chain = view.tree.chain()
        end = chain[-1] if chain else view.tree.root
        return end if len(chain) < self._deepest and view.is_open(end) else None

    @property
    def _deepest(self) -> int:
        # A proposal, a guess at the token that the target will put after it, and the next proposal behind that:
        # with every guess right, the next proposal is there when the verdict is.
        return 2 * self.most + 1

    def draft_budget(self, view: View, node: Node) -> DraftBudget:
        """See `Policy.draft_budget`."""
        # On the drafter's turn, up to a proposal.
        deepest = min(self.most, view.limit) if view.due is None else self._deepest
        return DraftBudget(min(deepest, view.depth) - view.tree.depth(node) - 1)

    def should_rest(self) -> bool:
        """See `Policy.should_rest`."""
        return False

    def should_rest_on(self, num_behind: int) -> bool:
        """See `Policy.should_rest_on`."""
        return False

    def should_catch_up(self, num_tokens: int) -> bool:
        """See `Policy.should_catch_up`."""
        return False


# Tokens to propose before anything was measured.
UNPRICED = 2
# Nodes that will hardly ever be asked for are not worth their electricity.
LEAST_REACH = 0.02
# By what factor speculating must promise to be better before a rest is ended.
BETTER = 1.02
# Tokens over which catching up must pay for itself.
AMORTISED = 100.0
# By what factor it must have been worse before one begins.
WORSE = 0.99
# Proposals in a row that may have nothing in them, before one begins.
MOST_EMPTY = 8
# The part of the time that may go into finding out whether a rest should end; and how much of it is kept for later, in
# plain tokens.
PROBING, MOST_SAVED = 0.02, 8.0
# Rounds of a rest after which a model that was wrong is believed again, but for 1/e.
TRUST_MEMORY = 100.0
# Tokens that are worth catching up with at once.
CATCH_UP, MOST_PATIENCE = 6, 96


@attrs.define
class AutoPolicy:
    """The rules over measured prices.

    *Send or wait*: a token goes into the proposal if `reach > R (ΔT_v + wait)`: what it may bring, against what else
    could be had in the time that it costs.
    *Work ahead or rest*: a node is drafted after if `reach T_d > κ T_d + (1 - reach) overrun`: the time that it may
    save, against the time that the target is later for it; `overrun` is how far it would run past the verdict, which
    then waits for a step that was of no use.
    *Speculate at all*: where speculating brings less than decoding plainly.

    Attributes:
        prices: of the runtime.
        calibration: of the drafter, under the session's rule.
        num_guesses: see `Policy`; 1 makes a single chain of the tree.
    """

    prices: Prices
    calibration: Calibration
    num_guesses: int = 3
    _allowance: float = 0.0
    _patience: int = CATCH_UP
    _num_empty: int = 0  # proposals in a row with nothing in them

    def proposal(self, view: View) -> list[Node] | None:
        """See `Policy.proposal`."""
        nodes = self._proposal(view)
        if nodes is not None:
            self._num_empty = 0 if nodes else self._num_empty + 1
        return nodes

    def _proposal(self, view: View) -> list[Node] | None:
        chain = view.tree.chain()[: view.limit]
        if not self.prices.is_known and len(chain) >= UNPRICED:
            return chain
        worth, per_token = self.prices.rate, self.prices.verify.per_token
        ready = [node for node in chain if node.reach > worth * per_token]  # reach falls along a chain
        end = view.growable()
        if chain and not view.tree.root.is_expanded:
            # What was looked up might be sent at once. Or is it worth more to have the drafter begin at the root?
            now = sum(node.reach - worth * per_token for node in ready)
            if now > self._gain_by_drafting(view, view.tree.root):
                return ready
            end = view.tree.root
        elif len(ready) < len(chain) or end is None:
            return ready
        return None if self._gain_by_drafting(view, end) > 0.0 else ready

    def _gain_by_drafting(self, view: View, end: Node) -> float:
        """Tokens, beyond what else the time would bring, of waiting for the drafter to go on after a node."""
        worth, per_token = self.prices.rate, self.prices.verify.per_token
        reached = self._wait(view, end)
        price, gain, reach = worth * (per_token + self._late(view, 0.0, reached)), 0.0, end.reach
        for _ in range(view.limit - view.tree.depth(end)):
            reach *= self.calibration.mean
            if reach <= price:
                break
            gain += reach - price
            before, reached = reached, reached + self.prices.draft(1, beside=reached < view.queue_slack_s)
            price = worth * (per_token + self._late(view, before, reached))
        return gain

    def _late(self, view: View, begin: float, end: float) -> float:
        """Seconds by which the target is later for drafting between two moments, counted from now.

        While it has passes of other sessions, only by how much the two slow each other down.
        """
        hidden = max(0.0, min(end, view.queue_slack_s) - begin)
        return end - begin - hidden + self.prices.verify.delay * hidden

    def _wait(self, view: View, end: Node) -> float:
        """Seconds until the chain is one token longer."""
        left = max(0.0, view.in_flight_until - view.now) if view.in_flight is not None else 0.0
        if view.in_flight is end:
            return left
        # A drafter that has fallen behind catches up once; that is not the price of this token.
        return left + self.prices.draft(1, beside=left < view.queue_slack_s)

    def expansion(self, view: View) -> Node | None:
        """See `Policy.expansion`."""
        if view.due is None:
            root = view.tree.root
            return root if view.is_open(root) else view.growable()
        best, best_value = None, 0.0
        for node in view.tree.frontier():
            if node.reach < LEAST_REACH:
                break
            if view.is_open(node):
                value = node.reach / max(self.prices.draft(view.width(node), beside=True), 1e-9)
                if value > best_value:
                    best, best_value = node, value
        if best is None or not self._is_worth_drafting(view, best):
            return None
        return best

    def _is_worth_drafting(self, view: View, node: Node) -> bool:
        assert view.due is not None
        return self._worth(view, view.width(node), view.due)(node.reach, view.now)

    def _worth(self, view: View, width: int, due: float) -> StepWorth:
        prices = self.prices
        step = prices.draft(1, beside=False)
        # What can be drafted once the verdict is there, while the target has others' passes, saves it no time.
        saved = 0.0 if self._num_wanted * step <= view.queue_slack_s and view.queue_slack_s > 0.0 else step
        return StepWorth(prices.draft(width, beside=True), saved, prices.verify.delay, due)

    @property
    def _num_wanted(self) -> int:
        """How many tokens would be proposed if nobody had to wait for them, as far as can be said beforehand."""
        mean, price = self.calibration.mean, self.prices.rate * self.prices.verify.per_token
        if mean >= 1.0 or price <= 0.0:
            return MAX_LOOKAHEAD
        return max(0, min(MAX_LOOKAHEAD, int(math.log(min(price, 1.0)) / math.log(max(mean, 1e-9)))))

    def draft_budget(self, view: View, node: Node) -> DraftBudget:
        """See `Policy.draft_budget`."""
        if not self.prices.is_known or node.children:
            # What comes after it is maybe not the drafter's choice, but what was looked up.
            return NO_DRAFT_BUDGET
        believe, mean = self.calibration.snapshot(), self.calibration.mean
        further = -1 - view.tree.depth(node)
        if view.due is None:
            # Up to a proposal: as long as `_gain_by_drafting` will say to wait for another token.
            step = self.prices.draft(1, beside=view.queue_slack_s > 0.0)
            price = self.prices.rate * (self.prices.verify.per_token + self._late(view, 0.0, step))
            most = min(view.limit, view.depth) + further
            if view.queue_slack_s > 0.0:
                # What a step costs then changes where others' passes end.
                most = min(most, int(view.queue_slack_s / max(step, 1e-9)))
            return DraftBudget(most, node.reach, least=price / max(mean, 1e-9), believe=believe, mean=mean)
        worth = self._worth(view, 1, view.due)
        return DraftBudget(view.depth + further, node.reach, LEAST_REACH, self._rival(view, node), worth, believe, mean)

    def _rival(self, view: View, node: Node) -> float:
        """The greatest reach of all else that could be drafted after, in steps of width 1."""
        step, best = max(self.prices.draft(1, beside=True), 1e-9), 0.0
        for other in view.tree.frontier():
            if other.reach <= max(best, LEAST_REACH):
                break
            if other is not node and view.is_open(other):
                best = max(best, other.reach * step / max(self.prices.draft(view.width(other), beside=True), step))
        return best

    def should_rest(self) -> bool:
        """See `Policy.should_rest`."""
        prices = self.prices
        if not prices.is_known:
            return False
        self._save_up()
        if not prices.speculative_rate:
            prices.speculate_afresh()
        if self._num_empty >= MOST_EMPTY:
            self._num_empty = 0
            return True
        modelled = prices.modelled_rate(self.calibration.mean)
        self.calibration.trust += (min(1.0, prices.speculative_rate / modelled) - self.calibration.trust) / TRUST_MEMORY
        # A few dozen rounds say little where the two are close, and the model says more.
        if (prices.speculative_rate + 2 * self.calibration.trust * modelled) / 3 >= WORSE * prices.plain_rate:
            return False
        self.calibration.trust = min(1.0, prices.speculative_rate / modelled)
        return True

    def should_rest_on(self, num_behind: int) -> bool:
        """See `Policy.should_rest_on`."""
        expected = self.calibration.trust * self.prices.modelled_rate(self.calibration.mean)
        if expected <= 0.0:
            return True
        seconds = 1.0 / expected + self.prices.draft(num_behind, beside=False) / AMORTISED
        if seconds * self.prices.plain_rate * BETTER > 1.0:
            return True
        self.prices.speculate_afresh()
        self._patience = CATCH_UP
        return False

    def should_catch_up(self, num_tokens: int) -> bool:
        """See `Policy.should_catch_up`."""
        self.calibration.trust += (1.0 - self.calibration.trust) / TRUST_MEMORY
        self._save_up()
        cost = self.prices.verify.delay * self.prices.draft(num_tokens, beside=True)
        if num_tokens < self._patience or cost > self._allowance:
            return False
        self._allowance -= cost
        if cost > PROBING * num_tokens * self.prices.plain.value:
            # So often it cannot be afforded for long.
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return True

    def _save_up(self) -> None:
        """Put the part of a round's time aside that may go into finding out."""
        second = self.prices.plain.value
        self._allowance = min(self._allowance + PROBING * second, MOST_SAVED * second)


def policy_for(setting: int | Literal["auto"], prices: Prices, rule: object) -> Policy:
    """The policy that a setting asks for.

    Args:
        setting: the session's `lookahead`.
        prices: of the runtime.
        rule: tells acceptance rules apart, between which the drafter's confidence means different things.
    """
    if setting == "auto":
        calibration = prices.calibration(rule)
        calibration.begin_text()
        return AutoPolicy(prices, calibration)
    return ChainPolicy(setting)
