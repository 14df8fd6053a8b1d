"""Replay: when to settle the tokens that a restored checkpoint left to be fed again.

They are put in front of the next pass, where they cost width but no pass of their own; every round that ends in a
rejection adds more. A round that feeds only committed tokens *settles* them, and still commits one token.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.define
class ReplayDebt:
    """The cost of the pending tokens since they were last settled.

    As in the ski rental problem, the rent is paid until it adds up to the price of buying, which costs at most twice
    what the best decision would have cost.
    """

    _rent_s: float = attrs.field(default=0.0, init=False)

    def should_settle(self, num_pending: int, price: Callable[[float], float], seconds_per_token: float) -> bool:
        """Decide whether this round feeds only committed tokens, and charge the round to the debt. `num_pending` of
        them must be fed again, without the last one. A settling round commits one token, which costs
        `seconds_per_token` at present.
        """
        if num_pending == 0:
            self._rent_s = 0.0
            return False
        self._rent_s += price(num_pending + 1) - price(1)
        if self._rent_s <= price(num_pending + 1) - seconds_per_token:
            return False
        self._rent_s = 0.0
        return True
