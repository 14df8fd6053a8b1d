"""A comparison of the ways of decoding several texts at once in one scenario: plain batches, turns and shared passes.

Nothing here imports mlx before `compare_streams` is called, so that arguments can be checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from protocol.open_options import MAX_BATCH

if TYPE_CHECKING:
    from runtime.simulation.scenario import Scenario
    from runtime.simulation.streams import SimulatedStreams

MAX_STREAMS = 64
STREAM_LOOKAHEADS = (1, 2, 4, 8)
STREAM_TOKENS = 100

StreamDecoding = Literal["plain batches", "in turns", "shared"]


@attrs.frozen
class SimulatedStreamsContender:
    """A way of decoding several texts at once, and its result.

    Speeds and times are relative to a token that is decoded plainly, for one text alone.

    Attributes:
        decoding: "plain batches" have no drafter, and a token of every text in each pass; "in turns" gives each text
            passes of its own; "shared" verifies proposals of several texts in one pass.
        lookahead: most tokens in a proposal, or "auto".
        speed: tokens of all texts, from the call to the last token of all.
        steady_speed: the same up to the end of the text that ends first: while all are at work.
        longest_wait: longest time between two tokens of one text.
        result: the simulated streams.
    """

    decoding: StreamDecoding
    lookahead: int | Literal["auto"]
    speed: float
    steady_speed: float
    longest_wait: float
    result: SimulatedStreams

    def as_json(self) -> dict[str, Any]:
        """The contender as a JSON object."""
        return {
            "decoding": self.decoding,
            "lookahead": self.lookahead,
            "speed": self.speed,
            "steady_speed": self.steady_speed,
            "longest_wait": self.longest_wait,
            "texts_per_pass": self.result.texts_per_pass,
            "rows_per_pass": self.result.rows_per_pass,
            "proposal": self.result.proposal,
            "acceptance_rate": self.result.acceptance_rate,
            "target_busy": self.result.target_busy,
            "draft_busy": self.result.draft_busy,
        }


@attrs.frozen
class StreamsComparison:
    """Ways of decoding several texts at once in one scenario.

    Attributes:
        scenario: what was simulated.
        num_streams: number of texts.
        num_tokens: length of each text.
        contenders: plain batches first, then turns, shared passes with fixed lookaheads, and "auto" with shared passes.
    """

    scenario: Scenario
    num_streams: int
    num_tokens: int
    contenders: Sequence[SimulatedStreamsContender]

    @property
    def plain(self) -> SimulatedStreamsContender:
        """Plain batches."""
        return self.contenders[0]

    @property
    def turns(self) -> SimulatedStreamsContender:
        """The automatic lookahead, each text with passes of its own."""
        return self.contenders[1]

    @property
    def fixed(self) -> Sequence[SimulatedStreamsContender]:
        """Shared passes with fixed lookaheads."""
        return self.contenders[2:-1]

    @property
    def best_fixed(self) -> SimulatedStreamsContender:
        """The fastest of them, chosen in hindsight."""
        return max(self.fixed, key=lambda contender: contender.steady_speed)

    @property
    def auto(self) -> SimulatedStreamsContender:
        """The automatic lookahead with shared passes."""
        return self.contenders[-1]

    @property
    def over_plain(self) -> float:
        """Steady speed of "auto" with shared passes over that of plain batches."""
        return self.auto.steady_speed / self.plain.steady_speed

    @property
    def over_turns(self) -> float:
        """Steady speed of "auto" with shared passes over that in turns."""
        return self.auto.steady_speed / self.turns.steady_speed

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "scenario": attrs.asdict(self.scenario),
            "streams": self.num_streams,
            "tokens": self.num_tokens,
            "contenders": [contender.as_json() for contender in self.contenders],
            "best_fixed_lookahead": self.best_fixed.lookahead,
            "auto_over_plain_batches": self.over_plain,
            "auto_over_turns": self.over_turns,
        }


def compare_streams(
    scenario: Scenario,
    num_streams: int,
    num_tokens: int = STREAM_TOKENS,
    lookaheads: Sequence[int] = STREAM_LOOKAHEADS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StreamsComparison:
    """Decode several texts at once in each way.

    Args:
        scenario: what to simulate.
        num_streams: number of texts, in [1, 64].
        num_tokens: length of each text, >= 1.
        lookaheads: those of the shared passes, each in [1, 64]; at least one.
        on_progress: called with a description of each run before it starts.

    Raises: SettingsError: an argument is out of its range.
    """
    from runtime.simulation.streams import simulate_streams

    plain_seconds = scenario.verify_seconds(1)
    contenders: list[SimulatedStreamsContender] = []
    plans = list(_plans(lookaheads))
    for number, (decoding, lookahead, max_batch) in enumerate(plans, start=1):
        on_progress(f"simulating {number} of {len(plans)}: {decoding}, lookahead {lookahead}")
        result = simulate_streams(
            scenario, num_streams, num_tokens=num_tokens, lookahead=lookahead, max_batch=max_batch
        )
        contenders.append(
            SimulatedStreamsContender(
                decoding,
                lookahead,
                speed=result.speed * plain_seconds,
                steady_speed=result.steady_speed * plain_seconds,
                longest_wait=result.longest_wait / plain_seconds,
                result=result,
            )
        )
    return StreamsComparison(scenario, num_streams, num_tokens, contenders)


def _plans(lookaheads: Sequence[int]) -> Iterator[tuple[StreamDecoding, int | Literal["auto"], int]]:
    """The way of decoding, the lookahead and `max_batch` of each contender."""
    yield "plain batches", 0, MAX_BATCH
    yield "in turns", "auto", 1
    for lookahead in lookaheads:
        yield "shared", lookahead, MAX_BATCH
    yield "shared", "auto", MAX_BATCH
