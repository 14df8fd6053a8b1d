"""`lookahead="auto"`: the policy that decides by measured prices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import attrs

from protocol.calibration import Calibration
from protocol.lookahead_policy import EMPTY_BUDGET, ChainPolicy, DraftBudget, Policy, PolicyView, StepWorth
from protocol.lookahead_tree import Guess, Node
from protocol.open_options import WorkAhead
from protocol.prices import Mean, Prices
from protocol.settings import MAX_LOOKAHEAD

UNPRICED_LOOKAHEAD = 2  # tokens to propose before anything was measured
MIN_REACH = 0.02  # nodes with a smaller reach are not drafted after: they would cost power for next to nothing
# How many draft steps of a budget have a price each; later steps have the last one's. That will do: whether to propose
# is decided after each step in any case, and what is drafted beyond the proposal is drafted ahead.
MAX_PRICED_STEPS = 16
# A rest begins when speculating was worse than plain decoding by the first factor, and ends at the promise of the
# other.
REST_BELOW, RESUME_ABOVE = 0.99, 1.02
CATCH_UP_HORIZON = 100.0  # tokens over which catching up with the text must pay for itself
MAX_EMPTY_PROPOSALS = 8  # a rest begins after this many proposals in a row with nothing in them
# Unread tokens with which a resting drafter catches up, if that delays the target by at most this share of their time.
MIN_CATCH_UP, PROBE_SHARE = 6, 0.02
# If more than this share of the recent proposals were copied, the measured rate says little about the drafter.
MAX_COPIED_SHARE = 0.1
# Rounds of each text in a rest after which a distrust of the price model has faded to 1/e. Texts share it.
TRUST_MEMORY_ROUNDS = 100.0


@attrs.define
class AutoPolicy:
    """Four rules over measured prices.

    *Send or wait*: a proposal grows while `Σ reach > R (ΔT_v + wait)` for the tokens to be added. The left side is how
    many of them are accepted on average; the right side is how many tokens would be decoded otherwise in the time that
    they cost.
    *Work ahead or rest*: a node is drafted after if `reach T_d > κ T_d + (1 - reach) overrun`. The left side is the
    time that the step may save, the right side is the time by which it delays the target. `overrun` is how far the
    step would run past the verdict, which then waits for a step that was of no use.
    *Copy or draft*: each place of a proposal gets what promises more tokens from there on: a copy, by the reach of its
    own tokens, or a draft, by the mean acceptance. A copy is not delayed for a draft that promises less.
    *Speculate at all*: the target decodes alone while speculating brings less than plain decoding.
    """

    prices: Prices  # of the runtime
    calibration: Calibration  # of the drafter, under the session's rule
    works_ahead: bool = True  # see `Policy`; if so, `expansion` decides for each node
    only_copies: bool = False  # whether only copied tokens are proposed, because there is no model or it rests
    _num_empty_proposals: int = 0  # in a row
    _copied_share: Mean = attrs.field(factory=lambda: Mean(memory=30.0))  # of the proposals

    def proposal(self, view: PolicyView) -> list[Node] | None:
        nodes = self._proposal(view)
        if nodes is not None:
            self._num_empty_proposals = 0 if nodes else self._num_empty_proposals + 1
            self._copied_share.observe(float(any(_is_copied(node) for node in nodes)))
        return nodes

    def _proposal(self, view: PolicyView) -> list[Node] | None:
        chain = view.tree.chain()[: view.max_proposal]
        if not self.prices.is_known and len(chain) >= UNPRICED_LOOKAHEAD:
            # All that the drafter itself has drafted, but no long copy at an unknown price.
            num_drafted = next((place for place, node in enumerate(chain) if _is_copied(node)), len(chain))
            return chain[: max(UNPRICED_LOOKAHEAD, num_drafted)]
        num_ready = self._num_worthwhile(chain)
        gain = sum([node.reach for node in chain[:num_ready]])
        if num_ready > 0:
            gain -= self.prices.rate * self.prices.extra_seconds(only_copies=self.only_copies)(num_ready)
        _, gain_by_drafting = self._best_end(view)
        return None if gain_by_drafting > max(0.0, gain) else chain[:num_ready]

    def worth_proposing(self, view: PolicyView) -> list[Node]:
        """What would be proposed if nothing more were drafted."""
        chain = view.tree.chain()[: view.max_proposal]
        return chain[: self._num_worthwhile(chain)]

    def _best_end(self, view: PolicyView) -> tuple[Node | None, float]:
        """Where to draft so that a proposal gains most, after the chain or instead of a copy; and that gain."""
        ends = [view.growable(), view.tree.root if view.is_open(view.tree.root) else None]
        gains = [(end, self._gain_by_drafting(view, end)) for end in dict.fromkeys(ends) if end is not None]
        return max(gains, key=lambda pair: pair[1], default=(None, 0.0))

    def _num_worthwhile(self, chain: Sequence[Node]) -> int:
        """How many tokens of a chain to propose.

        This depends on a token's reach and those before it, never on what was drafted after it, since that depends on
        which token was drawn. Those after it are assumed to be as likely as on average; only a copy's have their own
        reach. So a token that makes a pass dearer is proposed if those after it should make up for that.
        """
        if not chain:
            return 0
        costs = [0.0]  # of proposals of each length, in tokens
        rate, extra_s = self.prices.rate, self.prices.extra_seconds(only_copies=self.only_copies)
        for length, node in enumerate(chain, 1):
            expected, reach, longer, goes_on = 0.0, node.reach, length, _is_copied(node)
            while True:
                if longer == len(costs):
                    costs.append(rate * extra_s(longer))
                expected += reach
                if expected > costs[longer] - costs[length - 1]:
                    break
                goes_on = goes_on and longer < len(chain) and _is_copied(chain[longer])
                reach = chain[longer].reach if goes_on else reach * self.calibration.mean_acceptance
                longer += 1
                if longer > MAX_LOOKAHEAD or reach < MIN_REACH:
                    return length - 1
        return len(chain)

    def drafted(self, guess: Guess) -> Guess:
        confidence = self.calibration(None, guess.raw, guess.staleness)
        return attrs.evolve(guess, confidence=confidence, worth=confidence * (1.0 + self._expected_further()))

    def copied(self, guesses: Iterable[Guess], *, then_drafts: bool) -> list[Guess]:
        guesses, copied, confidences = iter(guesses), list[Guess](), list[float]()

        def reaches() -> Iterator[float]:
            reach = 1.0
            for guess in guesses:
                copied.append(guess)
                confidences.append(self.calibration(guess.copy_kind, guess.raw))
                reach *= confidences[-1]
                yield reach
                if reach < MIN_REACH:
                    return

        num_worthwhile, _ = self._best_length(reaches())
        may_draft = then_drafts and 0 < num_worthwhile == len(copied) and next(guesses, None) is None
        further = self._expected_further() if may_draft else 0.0
        for place in range(len(copied) - 1, -1, -1):
            worth = confidences[place] * (1.0 + further)
            further = worth if place < num_worthwhile else 0.0
            copied[place] = attrs.evolve(copied[place], confidence=confidences[place], worth=worth)
        return copied

    def _expected_further(self) -> float:
        """Accepted tokens to expect of a drafter after a token that is accepted, if the target waits for its steps."""
        best_gain = expected = further = 0.0
        reach, step_s = 1.0, self.prices.draft_share_s(1, beside_target=False)
        rate, extra_s = self.prices.rate, self.prices.extra_seconds(only_copies=False)
        first_s = extra_s(1)
        for length in range(1, MAX_LOOKAHEAD):
            reach *= self.calibration.mean_acceptance
            if reach < MIN_REACH:
                break
            expected += reach
            gain = expected - rate * (extra_s(1 + length) - first_s + length * step_s)
            if gain > best_gain:
                best_gain, further = gain, expected
        return further

    def _best_length(self, reaches: Iterable[float]) -> tuple[int, float]:
        """How many drafted tokens to propose, by falling reaches, and the tokens gained, less their time's worth."""
        best_length, best_gain, expected, rate = 0, 0.0, 0.0, self.prices.rate
        extra_s = self.prices.extra_seconds(only_copies=self.only_copies)
        for length, reach in enumerate(reaches, 1):
            expected += reach
            gain = expected - rate * extra_s(length)
            if gain > best_gain:
                best_length, best_gain = length, gain
            # Go on only if some number of further tokens, each as likely as this one, would be worth their price.
            if all(
                expected + more * reach - rate * extra_s(length + more) <= best_gain for more in (1, 2, 4, 8, 16, 32)
            ):
                break
        return best_length, best_gain

    def _gain_by_drafting(self, view: PolicyView, end: Node) -> float:
        """As the gain of `_best_length`, if the target waits for the drafter to go on after a node."""
        rate, depth, reach = self.prices.rate, view.tree.depth(end), end.reach
        extra_s = self.prices.extra_seconds(only_copies=False)
        acceptance = self.calibration.mean_acceptance
        expected = sum(node.reach for node in view.tree.chain()[:depth])
        drafted_s, best_gain = self._next_token_s(view, end), 0.0
        step_s, step_beside_target_s = (
            self.prices.draft_share_s(1, beside_target=beside_target) for beside_target in (False, True)
        )
        for length in range(depth + 1, self._max_drafted(view) + 1):
            reach *= acceptance
            expected += reach
            cost_s = extra_s(length) + self._target_delay_s(view, drafted_s, self.prices.core_hold_s)
            best_gain = max(best_gain, expected - rate * cost_s)
            further = reach * acceptance / max(1.0 - acceptance, 1e-9)  # an upper bound: all further tokens, at no cost
            if reach < MIN_REACH or expected + further - rate * cost_s <= best_gain:
                break
            drafted_s += step_beside_target_s if drafted_s < view.queue_slack_s else step_s
        return best_gain

    def _max_drafted(self, view: PolicyView) -> int:
        """How many tokens to draft for a proposal at most."""
        if not self._waits_for_all:
            return view.max_proposal
        return min(view.max_proposal, self._common_lookahead)

    @property
    def _waits_for_all(self) -> bool:
        """Whether texts share the passes of both models, so that they wait for each other, and are padded alike."""
        return self.prices.num_texts > 1 and self.prices.drafts_together

    @property
    def _common_lookahead(self) -> int:
        """How far texts that wait for each other are drafted for, >= 1."""
        return max(1, self.prices.best_lookahead())

    def _target_delay_s(self, view: PolicyView, drafting_s: float, core_hold_s: float = 0.0) -> float:
        """Seconds by which drafting delays a target, which other sessions' passes hide, but for the cores it lacks."""
        hidden_s = min(drafting_s, view.queue_slack_s)
        slowed_s = hidden_s + core_hold_s if hidden_s > 0.0 else 0.0
        return drafting_s - hidden_s + self.prices.verify.target_slowdown * slowed_s

    def _next_token_s(self, view: PolicyView, end: Node) -> float:
        """Seconds from now until there is one more token after the end of the chain."""
        remaining_s = max(0.0, view.drafting_until_s - view.now_s) if view.drafting_node is not None else 0.0
        if view.drafting_node is end:
            return remaining_s
        beside_target = remaining_s < view.queue_slack_s
        step_s = self.prices.draft_share_s(1, beside_target=beside_target)
        # A drafter that has fallen behind must catch up once, whatever is drafted next. But copied tokens before this
        # end are fed for nothing if the target rejects one of them.
        root = view.tree.root
        if end is not root and (num_to_feed := view.num_to_feed(end)) > 1:
            wide_s, catch_up_s = (
                self.prices.draft_share_s(width, beside_target=beside_target)
                for width in (num_to_feed, view.num_to_feed(root))
            )
            step_s += (1.0 - end.reach) * max(0.0, wide_s - catch_up_s)
        return remaining_s + step_s

    def expansion(self, view: PolicyView) -> Node | None:
        if view.verdict_due_s is None:
            return self._best_end(view)[0]
        if self._waits_for_all and not self.prices.works_ahead(self._common_lookahead):
            return None
        best, best_reach_per_s = None, 0.0
        for node in view.tree.frontier():
            if node.open_reach < MIN_REACH:
                break
            if view.is_open(node):
                step_s = self.prices.draft_share_s(view.num_to_feed(node), beside_target=True)
                reach_per_s = node.open_reach / max(step_s, 1e-9)
                if reach_per_s > best_reach_per_s:
                    best, best_reach_per_s = node, reach_per_s
        if best is None:
            return None
        # Steps after this one keep what cores it takes from the target, so only this one pays for holding them.
        step_worth = self._step_worth(view, view.num_to_feed(best), view.verdict_due_s, self.prices.core_hold_s)
        return best if step_worth(best.open_reach, view.now_s) else None

    def _step_worth(self, view: PolicyView, width: int, verdict_due_s: float, core_hold_s: float = 0.0) -> StepWorth:
        step_s = self.prices.draft_share_s(1, beside_target=False)
        # A step saves the target no time if it can be done after the verdict while the target is busy with others.
        is_hidden = view.queue_slack_s > 0.0 and self._expected_proposal * step_s <= view.queue_slack_s
        beside_target_s = self.prices.draft_share_s(width, beside_target=True)
        return StepWorth(
            step_s=beside_target_s,
            saved_step_s=0.0 if is_hidden else step_s,
            target_delay_s=self.prices.verify.target_slowdown * (beside_target_s + core_hold_s),
            verdict_due_s=verdict_due_s,
        )

    @property
    def _expected_proposal(self) -> int:
        """How many tokens would be proposed if waiting for them cost nothing, as far as can be said in advance."""
        acceptance = self.calibration.mean_acceptance
        reaches = (acceptance**depth for depth in range(1, MAX_LOOKAHEAD + 1))
        return self._best_length(itertools.takewhile(lambda reach: reach >= MIN_REACH, reaches))[0]

    def draft_budget(self, view: PolicyView, node: Node) -> DraftBudget:
        expected_worth = self.calibration.mean_acceptance * (1.0 + self._expected_further())
        bests = (child.best for child in node.children.values())
        if not self.prices.is_known or any(best is not None and best.worth > expected_worth for best in bests):
            # The best token after the node may be a copied one, not the drafter's choice.
            return EMPTY_BUDGET
        calibration, acceptance = self.calibration.snapshot(), self.calibration.mean_acceptance
        budget = partial(DraftBudget, reach=node.reach, calibrate=calibration, mean_acceptance=acceptance)
        num_drafted = view.tree.depth(node) + 1
        if view.verdict_due_s is None:
            # Up to a proposal: for as long as `_gain_by_drafting` will say to wait for another token.
            step_s = self.prices.draft_share_s(1, beside_target=view.queue_slack_s > 0.0)
            delay_s = self._target_delay_s(view, step_s)
            max_steps = min(self._max_drafted(view), view.max_depth) - num_drafted
            if view.queue_slack_s > 0.0:
                # The price of a step changes where the others' passes end.
                max_steps = min(max_steps, int(view.queue_slack_s / max(step_s, 1e-9)))
            longest = num_drafted + max(1, min(max_steps, MAX_PRICED_STEPS))
            extras_s = map(self.prices.extra_seconds(only_copies=False), range(num_drafted, longest + 1))
            costs_s = [longer_s - extra_s + delay_s for extra_s, longer_s in itertools.pairwise(extras_s)]
            worth = self.prices.rate / max(acceptance, 1e-9)
            return budget(max_steps, min_reaches=tuple(worth * cost_s for cost_s in costs_s))
        return budget(
            view.max_depth - num_drafted,
            min_reaches=(MIN_REACH,),
            best_other_reach=self._best_other_reach(view, node),
            step_worth=self._step_worth(view, 1, view.verdict_due_s),
        )

    def _best_other_reach(self, view: PolicyView, node: Node) -> float:
        """The greatest reach among the other nodes that could be drafted after, per time of a step of width 1."""
        step_s, best = max(self.prices.draft_share_s(1, beside_target=True), 1e-9), 0.0
        for other in view.tree.frontier():
            if other.open_reach <= max(best, MIN_REACH):
                break
            if other is not node and view.is_open(other):
                other_step_s = max(self.prices.draft_share_s(view.num_to_feed(other), beside_target=True), step_s)
                best = max(best, other.open_reach * step_s / other_step_s)
        return best

    def should_rest(self) -> bool:
        prices, calibration = self.prices, self.calibration
        if not prices.is_known:
            return False
        if not prices.speculative_rate:
            prices.reset_speculative_rate()
        if self._num_empty_proposals >= MAX_EMPTY_PROPOSALS:
            self._num_empty_proposals = 0
            return True
        modelled_rate = prices.modelled_rate(calibration.mean_acceptance)
        if modelled_rate <= 0.0:
            return False
        speculative_rate = prices.speculative_rate
        if self._copied_share.value > MAX_COPIED_SHARE:
            speculative_rate = min(speculative_rate, self.calibration.trust * modelled_rate)
        measured_share = min(1.0, speculative_rate / modelled_rate)
        self.calibration.trust += (measured_share - self.calibration.trust) / (TRUST_MEMORY_ROUNDS * prices.num_texts)
        # A few dozen rounds say little where the two rates are close, and the model says more.
        rate = (speculative_rate + 2 * self.calibration.trust * modelled_rate) / 3
        if rate >= REST_BELOW * prices.plain_rate:
            return False
        self.calibration.trust = measured_share
        return True

    def should_rest_on(self, num_behind: int, num_rounds: int) -> bool:
        share_faded = min(1.0, num_rounds / (TRUST_MEMORY_ROUNDS * self.prices.num_texts))
        self.calibration.trust += (1.0 - self.calibration.trust) * share_faded
        rate = self.calibration.trust * self.prices.modelled_rate(self.calibration.mean_acceptance)
        if rate <= 0.0:
            return True
        token_s = 1.0 / rate + self.prices.draft_s(num_behind, beside_target=False) / CATCH_UP_HORIZON
        if token_s * self.prices.plain_rate * RESUME_ABOVE > 1.0:
            return True
        self.prices.reset_speculative_rate()
        return False

    def should_catch_up(self, num_behind: int, num_generated: int) -> bool:
        cost_s = self.prices.verify.target_slowdown * self.prices.draft_s(num_behind, beside_target=True)
        plain_s = num_generated / self.prices.plain_rate if self.prices.plain_rate > 0.0 else 0.0
        return num_generated >= MIN_CATCH_UP and cost_s <= PROBE_SHARE * plain_s


def _is_copied(node: Node) -> bool:
    best = node.best
    return best is not None and best.is_copied


def policy_for(
    lookahead: int | Literal["auto"], prices: Prices, rule: object, work_ahead: WorkAhead = "auto"
) -> Policy:
    """The policy that a setting asks for.

    `rule` tells acceptance rules apart, under which confidence differs; `work_ahead` says whether to draft while a
    verdict is due: "auto" by prices, and so does "always" unless the lookahead is fixed.
    """
    if lookahead == "auto":
        calibration = prices.calibration(rule)
        calibration.begin_text()
        return AutoPolicy(prices, calibration, works_ahead=work_ahead != "never")
    return ChainPolicy(lookahead, work_ahead != "never", prices=prices if work_ahead == "auto" else None)
