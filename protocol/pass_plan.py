"""The pass plan: which rounds share the target's next forward pass, how many tokens of each it reads, and when.

A pass over B texts is as wide as the widest of them, W: the others are padded, so that it costs the time of B·W rows.
Each text must feed its missing committed tokens, and may feed drafted tokens, each of which is worth the probability
that it is accepted. The plan is the one with most tokens a second: Σ expected tokens / (wait + T(B·W)). Therefore:

* rows that cost nothing, on a plateau of T, are used; rows that cost much, beyond a step of T, only if they gain much;
* a text without drafted tokens is left out of a wide pass, where padding would make it dear;
* a pass waits for a round that is about to be ready if the target would otherwise compute that round alone.

A round that is left out takes part in the next pass, whatever that costs: no round is left out twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs

# The seconds of a pass, by the rows that it computes.
PassSeconds = Callable[[int], float]

# How many moments are compared at which the pass could begin.
MAX_MOMENTS = 4
# A wait for further rounds must promise to make the pass better by this factor, since their coming is guessed at.
MIN_GAIN_OF_WAITING = 1.02
# Texts without drafts are decoded in several passes only if that promises this factor: texts that are all in one pass
# are decoded a pass ahead, and the price of a pass that is avoided gets old.
MIN_GAIN_OF_DIVIDING = 1.1


@attrs.frozen
class ReadyRound:
    """A round that could take part in the next pass.

    Attributes:
        num_needed: tokens that it must feed, >= 1: those committed tokens that its cache lacks. Its first new token
            comes from the last of them.
        reach: for each drafted token, the probability that it and all before it are accepted; each in [0, 1], falling.
        was_passed_over: whether the last pass left it out, so that this one must not.
        due_s: seconds from now until it should be ready, >= 0; 0 if it is.
        can_hurry: whether it could also take part before, with the tokens that it must feed alone.
    """

    num_needed: int
    reach: tuple[float, ...] = ()
    was_passed_over: bool = False
    due_s: float = 0.0
    can_hurry: bool = False

    def after(self, wait_s: float) -> ReadyRound | None:
        """The round as it could take part in a pass that begins after a wait; None if it could not."""
        if self.due_s <= wait_s:
            return self
        return attrs.evolve(self, reach=(), due_s=0.0) if self.can_hurry else None

    def num_drafted(self, width: int) -> int:
        """How many drafted tokens it feeds in a pass of a width."""
        return min(len(self.reach), width - self.num_needed)

    @property
    def max_width(self) -> int:
        """Tokens that it feeds if nothing is left out."""
        return self.num_needed + len(self.reach)


@attrs.frozen
class PassPlan:
    """The next pass.

    Attributes:
        num_drafted: drafted tokens to feed, by the index of each round that takes part.
        width: of the pass.
        wait_s: seconds to wait for those of them that are not ready yet; 0 if all are.
    """

    num_drafted: dict[int, int]
    width: int
    wait_s: float = 0.0


def plan_pass(
    rounds: Sequence[ReadyRound], seconds: PassSeconds, max_batch: int, *, max_wait_s: float = 0.0
) -> PassPlan:
    """Decide on the next pass.

    The first round that is ready takes part in any case, and then those that were passed over.

    Args:
        rounds: in the order in which they became ready, at least one of which is.
        seconds: what a pass costs by its rows, rising.
        max_batch: most rounds in a pass, >= 1.
        max_wait_s: longest wait for rounds that are not ready.
    """
    best, best_rate = PassPlan({}, 0), -1.0
    for wait_s in _moments([each.due_s for each in rounds if 0.0 < each.due_s <= max_wait_s]):
        plan, rate = _plan_at(wait_s, rounds, seconds, max_batch)
        if not best.num_drafted or rate > MIN_GAIN_OF_WAITING * best_rate:
            best, best_rate = plan, rate
    return best


def best_number(num_texts: int, seconds: PassSeconds) -> int:
    """How many of some texts without drafts to decode in one pass: all, unless fewer give many more tokens a second."""

    def rate(number: int) -> float:
        return number / max(seconds(number), 1e-12)

    best = max(range(1, num_texts + 1), key=lambda number: (rate(number), number))
    return best if rate(best) >= MIN_GAIN_OF_DIVIDING * rate(num_texts) else num_texts


def _moments(dues_s: Sequence[float]) -> list[float]:
    """When the pass could begin: now, and then as further rounds become ready."""
    dues_s = sorted(set(dues_s))
    if len(dues_s) >= MAX_MOMENTS:
        dues_s = [dues_s[(len(dues_s) - 1) * i // (MAX_MOMENTS - 2)] for i in range(MAX_MOMENTS - 1)]
    return [0.0, *dues_s]


def _plan_at(
    wait_s: float, rounds: Sequence[ReadyRound], seconds: PassSeconds, max_batch: int
) -> tuple[PassPlan, float]:
    """The best pass that begins after a wait, and its tokens a second."""
    ready = {i: round for i, each in enumerate(rounds) if (round := each.after(wait_s)) is not None}
    first = next(i for i, each in enumerate(rounds) if each.due_s <= 0.0)
    required = [first, *(i for i in ready if rounds[i].was_passed_over and i != first)][:max_batch]
    optional = [i for i in ready if i not in required]
    # The expected tokens of each round, by the number of drafted ones that it feeds.
    expected = {i: list(accumulate(each.reach, initial=1.0)) for i, each in ready.items()}
    least_width = max(ready[i].num_needed for i in required)
    widths = {width for each in ready.values() for width in range(each.num_needed, each.max_width + 1)}
    best_rate, best_members, best_width = -1.0, required, least_width
    for width in sorted(width for width in widths if width >= least_width):
        total = sum(expected[i][ready[i].num_drafted(width)] for i in required)
        others = [(expected[i][ready[i].num_drafted(width)], -i) for i in optional if ready[i].num_needed <= width]
        # Each costs the same, so that those with most to gain come first.
        others.sort(reverse=True)
        for num_others in range(min(len(others), max_batch - len(required)) + 1):
            if num_others > 0:
                total += others[num_others - 1][0]
            num_members = len(required) + num_others
            rate = total / max(wait_s + seconds(num_members * width), 1e-12)
            # Of two that are as good, the one with more texts, and then the narrower one.
            if rate > best_rate or (rate == best_rate and num_members > len(best_members)):
                members = [*required, *(-index for _, index in others[:num_others])]
                best_rate, best_members, best_width = rate, members, width
    num_drafted = {i: ready[i].num_drafted(best_width) for i in sorted(best_members)}
    wait_s = max(ready[i].due_s for i in best_members)
    return PassPlan(num_drafted, best_width, wait_s), best_rate
