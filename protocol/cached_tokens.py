"""The tokens that a model's cache has processed, and the steps that bring it in line with a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from protocol.errors import ProtocolError


@attrs.frozen
class FeedPlan:
    """How to bring a cache in line with a text: rewind it to its first `keep` tokens, then feed the tokens `feed`."""

    keep: int
    feed: tuple[int, ...]


class CachedTokens:
    """The tokens that one cache has processed, in order: a ledger, by which it is brought in line with a text."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Length of a prefix that is known to agree with the committed text. That text only grows, so the prefix need
        # not be compared again, and a plan costs time for the new tokens, not for the whole text.
        self._num_agreed = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """A copy of the tokens."""
        return tuple(self._tokens)

    def plan(self, committed: Sequence[int], beyond: Sequence[int] = (), *, num_logits: int = 1) -> FeedPlan:
        """The shortest way to a cache of exactly `committed + beyond`: the committed text, which only grows, and
        drafted tokens. The last `num_logits` tokens are fed even if they are cached, for their logits.

        Raises: ProtocolError: num_logits exceeds the length of the text.
        """
        total = len(committed) + len(beyond)
        if num_logits > total:
            raise ProtocolError(f"cannot have {num_logits} rows of logits from {total} tokens")
        cached, num_common = self._tokens, min(self._num_agreed, len(committed))
        end = min(len(cached), len(committed))
        while num_common < end and cached[num_common] == committed[num_common]:
            num_common += 1
        self._num_agreed = num_common
        if num_common == len(committed):
            end = min(len(cached), total)
            while num_common < end and cached[num_common] == beyond[num_common - len(committed)]:
                num_common += 1
        keep = min(num_common, total - num_logits)
        feed = tuple(committed[keep:]) + tuple(beyond[max(0, keep - len(committed)) :])
        return FeedPlan(keep, feed)

    def follow(self, plan: FeedPlan) -> None:
        """Record that the cache has carried out a plan."""
        del self._tokens[plan.keep :]
        self._tokens += plan.feed
        self._num_agreed = min(self._num_agreed, plan.keep)

    def rewind(self, length: int) -> None:
        """Record that the cache was cut to its first `length` tokens."""
        del self._tokens[length:]
        self._num_agreed = min(self._num_agreed, length)


@attrs.define
class ReplayDebt:
    """When to settle the tokens that a restored checkpoint left to be fed again.

    They are put in front of the next pass, where they cost width but no pass of their own; every round that ends in a
    rejection adds more. A round that feeds only committed tokens *settles* them, and still commits one token. As in the
    ski rental problem, the rent is paid until it adds up to the price of buying, which costs at most twice what the
    best decision would have cost.
    """

    _rent_s: float = attrs.field(default=0.0, init=False)

    def should_settle(self, num_pending: int, price: Callable[[float], float], seconds_per_token: float) -> bool:
        """Whether this round feeds only committed tokens, `num_pending` of them again, and commits one token."""
        if num_pending == 0:
            self._rent_s = 0.0
            return False
        self._rent_s += price(num_pending + 1) - price(1)
        if self._rent_s <= price(num_pending + 1) - seconds_per_token:
            return False
        self._rent_s = 0.0
        return True
