"""Leaving a session: what a drafter has drawn is judged before it goes.

Unless the rule is match, a text is exact only if the decision to propose a token does not depend on which token was
drawn. But a drafter may fail because of a token that it drew: when it reads that token, or a logits processor does. If
it then left without proposing it, that token would be rarer in texts than under the target's distribution.

So a drafter that has to leave draws no new tokens, but proposes and rests as before until verdicts have consumed those
that it drew. Its withdrawal is made here and nowhere else.
"""

from __future__ import annotations

from protocol.lookahead_tree import LookaheadTree
from protocol.messages import Withdraw


def withdrawal(session: int, tree: LookaheadTree, *, at_once: bool = False) -> Withdraw | None:
    """The message by which a drafter leaves a session; None as long as it must stay.

    Args:
        session: its id.
        tree: what was drafted for it.
        at_once: whether all that was drawn is dropped. The reason must be one that is independent of which tokens were
            drawn; and if it is the drafter's turn, it must have proposed first, because a chain that ends the text, or
            that makes the drafter fail, is proposed earlier than others.
    """
    return None if tree.has_draws and not at_once else Withdraw(session)


def withdrawal_elsewhere(session: int) -> Withdraw:
    """The message for a drafter in another process that has withdrawn, or whose link is lost.

    All that has arrived from it was proposed. The loss is taken to be independent of which tokens were drawn.
    """
    return Withdraw(session)
