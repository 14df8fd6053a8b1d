"""The pass plan: which rounds share the target's next forward pass, and how many tokens of each it reads.

A pass over B texts is as wide as the widest of them, W: the others are padded, so that it costs the time of B·W rows.
Each text brings its missing committed tokens, which it needs, and drafted ones, which are worth what the chance is that
they stand. The plan is the one with most tokens a second: Σ expected tokens / T(B·W). So a plateau of T is filled, a
step is not climbed for little, and a text without a draft does not make a wide pass of others dearer. It goes with the
next one, whatever that costs: nobody is passed over twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

# The seconds of a pass, by the rows that it computes.
PassSeconds = Callable[[int], float]


@attrs.frozen
class ReadyRound:
    """A round that could take part in the next pass.

    Attributes:
        num_needed: tokens that it must feed, >= 1: those committed tokens that its cache lacks. Its first new token
            comes from the last of them.
        reach: for each drafted token, the probability that it and all before it are accepted; each in [0, 1], falling.
        was_passed_over: whether the last pass left it out, so that this one must not.
    """

    num_needed: int
    reach: tuple[float, ...] = ()
    was_passed_over: bool = False

    def num_drafted(self, width: int) -> int:
        """How many drafted tokens it feeds in a pass of a width."""
        return min(len(self.reach), width - self.num_needed)

    def expected(self, width: int) -> float:
        """Tokens that it is expected to commit in a pass of a width."""
        return 1.0 + sum(self.reach[: self.num_drafted(width)])

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
    """

    num_drafted: dict[int, int]
    width: int


def plan_pass(rounds: Sequence[ReadyRound], seconds: PassSeconds, max_batch: int) -> PassPlan:
    """Decide on the next pass.

    The first round takes part in any case, and then those that were passed over.

    Args:
        rounds: in the order in which they became ready, at least one.
        seconds: what a pass costs by its rows, rising.
        max_batch: most rounds in a pass, >= 1.
    """
    required = [i for i, each in enumerate(rounds) if i == 0 or each.was_passed_over][:max_batch]
    least_width = max(rounds[i].num_needed for i in required)
    widths = {width for each in rounds for width in range(each.num_needed, each.max_width + 1) if width >= least_width}
    best, best_rate = PassPlan({}, 0), -1.0
    for width in sorted(widths):
        others = [i for i, each in enumerate(rounds) if i not in required and each.num_needed <= width]
        # Each costs the same, so that those with most to gain come first.
        others.sort(key=lambda i: -rounds[i].expected(width))
        members, expected = list(required), sum(rounds[i].expected(width) for i in required)
        for joining in (None, *others[: max_batch - len(required)]):
            if joining is not None:
                members.append(joining)
                expected += rounds[joining].expected(width)
            rate = expected / max(seconds(len(members) * width), 1e-12)
            # Of two that are as good, the one with more texts, and then the narrower one.
            if rate > best_rate or (rate == best_rate and len(members) > len(best.num_drafted)):
                best, best_rate = PassPlan({i: rounds[i].num_drafted(width) for i in sorted(members)}, width), rate
    return best
