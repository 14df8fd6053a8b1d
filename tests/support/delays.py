"""Delays and costs for schedules in simulated time."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st
from scripted import Price

from protocol.lookahead_policy import ChainPolicy

# With zero, everything happens at once, in an order that trio chooses at random.
COSTS = [0.0, 0.25, 1.0, 3.0, 8.0, 20.0]


@attrs.frozen
class RestingPolicy(ChainPolicy):
    """A fixed lookahead whose decisions to rest (to leave a round to the target) come from a given sequence."""

    turns: Iterator[bool] = attrs.field(kw_only=True)

    def should_rest(self) -> bool:
        return next(self.turns)

    def should_rest_on(self, num_behind: int, num_rounds: int) -> bool:
        return next(self.turns)


def tuples(elements: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, min_size=1, max_size=max_size).map(tuple)


def cycled_prices(costs: Sequence[float]) -> Price:
    """A price that goes through a list again and again, whatever the job."""
    following: Iterator[float] = itertools.cycle(costs)
    return lambda job: next(following)
