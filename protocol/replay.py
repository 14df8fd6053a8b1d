"""When to settle what a restored checkpoint left to be fed again.

A checkpoint that is restored takes the accepted tokens with it, and they are put in front of the next window,
where they cost width and not a pass. With every round that ends in a rejection more of them pile up. A round
that feeds committed tokens only settles them, and still commits one token.
"""

from __future__ import annotations

from typing import Protocol

import attrs


class Price(Protocol):
    """What a forward pass takes, by its width."""

    @property
    def per_token(self) -> float:
        """Seconds that one more token in a pass costs."""
        ...

    def __call__(self, width: int) -> float:
        """Seconds of a pass."""
        ...


@attrs.define
class ReplayDebt:
    """What carrying pending tokens has cost since they were last settled.

    As in the ski-rental problem, one goes on paying the rent until it adds up to the price of buying; without
    knowing what is to come, that costs at most twice what the best decision would have cost.
    """

    _rent: float = attrs.field(default=0.0, init=False)

    def should_settle(self, num_pending: int, price: Price, seconds_per_token: float) -> bool:
        """Decide for the round that begins, and charge it.

        Args:
            num_pending: committed tokens to be fed again, >= 0, the last committed one not counted.
            price: of a pass, by width.
            seconds_per_token: what a committed token takes at present; the pass that settles commits one.

        Returns: whether to feed committed tokens only in this round.
        """
        if num_pending == 0:
            self._rent = 0.0
            return False
        self._rent += num_pending * price.per_token
        if self._rent <= price(num_pending + 1) - seconds_per_token:
            return False
        self._rent = 0.0
        return True
