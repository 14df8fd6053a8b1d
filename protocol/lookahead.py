"""How far to draft ahead, and when to send: decisions over a lookahead tree.

Under the rejection rule a decision may depend on the text before a token, on the distribution that
it was drawn from and on time, never on the drawn token itself. These look at depths only.
"""

from __future__ import annotations

from typing import Literal

import attrs

from protocol.tree import LookaheadTree, Node

AUTO_AFTER_MISS = 2
AUTO_MOST = 4


@attrs.frozen
class Lookahead:
    """A fixed policy over a single chain.

    Attributes:
        enough: tokens for which a proposal is worth waiting; it is sent as soon as they are there.
        most: tokens that go into one proposal where more than `enough` lie ready.
    """

    enough: int
    most: int

    @property
    def horizon(self) -> int:
        """How far beyond the committed text to draft while a verdict is due.

        A proposal of `most`, a guess at the token that the target will put after it, and the next
        proposal behind that: with every guess right, the next proposal is there when the verdict is.
        """
        return 2 * self.most + 1

    def proposal(self, tree: LookaheadTree, limit: int, *, can_grow: bool) -> list[Node] | None:
        """What to propose now.

        Args:
            tree: what is drafted.
            limit: most tokens that are of use, >= 0.
            can_grow: whether the tree can be grown by waiting.

        Returns: nodes in order, maybe none of them; or None to wait for more.
        """
        ready = tree.chain()[: min(self.most, limit)]
        if can_grow and len(ready) < min(self.enough, limit):
            return None
        return ready

    def expansion(self, tree: LookaheadTree, reach_limit: int) -> Node | None:
        """The node to draft after next, or None to rest.

        Args:
            tree: what is drafted.
            reach_limit: how many tokens beyond the root are of use at all.
        """
        deepest = min(self.horizon, reach_limit)
        return next((n for n in tree.frontier() if tree.depth(n) < deepest), None)


def lookahead_for(setting: int | Literal["auto"]) -> Lookahead:
    """The policy that a setting asks for."""
    if setting == "auto":
        return Lookahead(enough=AUTO_AFTER_MISS, most=AUTO_MOST)
    return Lookahead(enough=setting, most=setting)
