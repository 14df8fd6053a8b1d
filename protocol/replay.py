"""Replay: when to settle the tokens that a restored checkpoint left to be fed again.

Restoring a checkpoint removes accepted tokens from the cache. They are put in front of the next pass, where they cost
width but no pass of their own. Every round that ends in a rejection adds more of them. A round that feeds committed
tokens only *settles* them, and still commits one token.
"""

from __future__ import annotations

from typing import Protocol

import attrs


class Price(Protocol):
    """Seconds of a forward pass, by its rows."""

    def __call__(self, rows: float) -> float:
        """Seconds of a pass."""
        ...


@attrs.define
class ReplayDebt:
    """The cost of the pending tokens since they were last settled.

    As in the ski rental problem, the rent is paid until it adds up to the price of buying. Without knowledge of the
    future, that costs at most twice what the best decision would have cost.
    """

    _rent_s: float = attrs.field(default=0.0, init=False)

    def should_settle(self, num_pending: int, price: Price, seconds_per_token: float) -> bool:
        """Decide whether this round settles, and charge the round to the debt.

        Args:
            num_pending: committed tokens that must be fed again, >= 0, not counting the last committed one.
            price: of a pass, by rows.
            seconds_per_token: what a committed token costs at present; a settling round commits one.

        Returns: whether to feed only committed tokens in this round.
        """
        if num_pending == 0:
            self._rent_s = 0.0
            return False
        self._rent_s += price(num_pending + 1) - price(1)
        if self._rent_s <= price(num_pending + 1) - seconds_per_token:
            return False
        self._rent_s = 0.0
        return True
