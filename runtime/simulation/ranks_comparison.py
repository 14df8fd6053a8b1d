"""A comparison of numbers of ranks: how fast a sharded target decodes plainly, and with speculation.

Nothing here imports mlx before `compare_ranks` is called, so that arguments can be checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from runtime.simulation.comparison import LOOKAHEADS, NUM_TOKENS, Comparison, SimulatedContender, compare

if TYPE_CHECKING:
    from runtime.simulation.scenario import Scenario
    from runtime.simulation.sharding import Sharding


@attrs.frozen
class RanksRow:
    """One number of ranks.

    Attributes:
        comparison: the ways of decoding one text with so many.
    """

    comparison: Comparison

    @property
    def sharding(self) -> Sharding:
        """The ranks."""
        assert self.comparison.scenario.sharding is not None
        return self.comparison.scenario.sharding

    @property
    def plain(self) -> SimulatedContender:
        """Plain decoding."""
        return self.comparison.of("plain")[0]

    @property
    def auto(self) -> SimulatedContender:
        """Speculation with the automatic lookahead."""
        return self.comparison.of("tree")[0]

    def pass_ms(self, num_tokens: int) -> float:
        """Milliseconds of a target pass over so many tokens."""
        return self.comparison.scenario.verify_seconds(num_tokens) * self.sharding.pass_time

    def as_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        return {
            "ranks": self.sharding.ranks,
            "pass_ms": self.pass_ms(1),
            "exchange_ms": self.sharding.exchange_ms(1),
            "pass_ms_of_8_tokens": self.pass_ms(8),
            **self.comparison.as_json(),
        }


@attrs.frozen
class RanksComparison:
    """Several numbers of ranks, in otherwise the same scenario.

    Attributes:
        rows: one for each number, in order.
    """

    rows: Sequence[RanksRow]

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {"ranks": [row.as_json() for row in self.rows]}


def compare_ranks(
    scenario: Scenario,
    ranks: Sequence[int],
    num_tokens: int = NUM_TOKENS,
    lookaheads: Sequence[int] = LOOKAHEADS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RanksComparison:
    """Decode one text in each way with each number of ranks.

    Args:
        scenario: what to simulate; it has a sharding, whose ranks do not matter.
        ranks: each in [1, 1024].
        num_tokens, lookaheads: see `compare`.
        on_progress: called with a description of each run before it starts.
    """
    assert scenario.sharding is not None
    rows = []
    for number in ranks:

        def announce(text: str, number: int = number) -> None:
            on_progress(f"{number} ranks: {text}")

        sharded = attrs.evolve(scenario, sharding=attrs.evolve(scenario.sharding, ranks=number))
        rows.append(RanksRow(compare(sharded, num_tokens, lookaheads, announce)))
    return RanksComparison(rows)
