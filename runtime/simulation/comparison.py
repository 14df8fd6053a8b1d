"""A comparison of the ways of decoding one text in one scenario: plain, sequential, single chain and tree.

Nothing here imports mlx before `compare` is called, so that arguments can be checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    from actors.drafters.drafter import MakePolicy
    from protocol.lookahead_policy import Policy
    from protocol.prices import Prices
    from protocol.settings import Settings
    from runtime.simulation.scenario import Scenario
    from runtime.simulation.sharding import Sharding
    from runtime.simulation.simulation import SimulatedRun

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16)
NUM_TOKENS = 1000

Decoding = Literal["plain", "sequential", "single chain", "tree"]


@attrs.frozen
class SimulatedContender:
    """A way of decoding, and its result.

    Attributes:
        decoding: "plain" has no drafter; "sequential" drafts and verifies in turn; "single chain" drafts ahead while
            a verify pass runs; "tree" also drafts ahead for corrections.
        lookahead: most tokens in a proposal, or "auto".
        speed: tokens per second, relative to plain decoding.
        result: the simulated run.
    """

    decoding: Decoding
    lookahead: int | Literal["auto"]
    speed: float
    result: SimulatedRun

    @property
    def hit_rate(self) -> float:
        """Fraction of verdicts whose text had been drafted ahead; 0 if there were none."""
        counts = self.result.statistics
        verdicts = counts.lookahead_hits + counts.lookahead_misses
        return counts.lookahead_hits / verdicts if verdicts else 0.0

    def as_json(self) -> dict[str, Any]:
        """The contender as a JSON object."""
        counts = self.result.statistics
        return {
            "decoding": self.decoding,
            "lookahead": self.lookahead,
            "speed": self.speed,
            "tokens_per_round": counts.tokens_per_round,
            "acceptance_rate": counts.acceptance_rate,
            "fresh_acceptance": counts.fresh_acceptance,
            "stale_acceptance": counts.stale_acceptance,
            "hit_rate": self.hit_rate,
            "target_busy": counts.target_busy,
            "draft_busy": counts.draft_busy,
        }


@attrs.frozen
class Comparison:
    """Ways of decoding one text in one scenario.

    Attributes:
        scenario: what was simulated.
        num_tokens: length of the text.
        contenders: plain decoding first, the tree last.
    """

    scenario: Scenario
    num_tokens: int
    contenders: Sequence[SimulatedContender]

    def of(self, decoding: Decoding) -> list[SimulatedContender]:
        """The contenders of one way of decoding."""
        return [contender for contender in self.contenders if contender.decoding == decoding]

    @property
    def best_sequential(self) -> SimulatedContender:
        """The fastest sequential contender, chosen in hindsight."""
        return max(self.of("sequential"), key=lambda contender: contender.speed)

    @property
    def gain(self) -> float:
        """Speed of the tree over that of the best sequential contender."""
        return self.of("tree")[0].speed / self.best_sequential.speed

    def tokens_per_second(self, contender: SimulatedContender) -> float | None:
        """The speed of one of them in tokens per second; None where the scenario says no time of a pass."""
        sharding = self.scenario.sharding
        return None if sharding is None else contender.result.speed * 1000.0 / sharding.pass_time

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "scenario": attrs.asdict(self.scenario),
            "tokens": self.num_tokens,
            "contenders": [
                {**contender.as_json(), "tokens_per_second": self.tokens_per_second(contender)}
                for contender in self.contenders
            ],
            "best_sequential_lookahead": self.best_sequential.lookahead,
            "tree_over_best_sequential": self.gain,
        }


def compare(
    scenario: Scenario,
    num_tokens: int = NUM_TOKENS,
    lookaheads: Sequence[int] = LOOKAHEADS,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Decode one text in each way.

    Args:
        scenario: what to simulate.
        num_tokens: length of the text, >= 1.
        lookaheads: those of the sequential contenders, each in [1, 64]; at least one.
        on_progress: called with a description of each run before it starts.
    """
    from runtime.simulation.simulation import run_simulation

    contenders: list[SimulatedContender] = []
    plans = list(_plans(lookaheads))
    for number, (decoding, lookahead, make_policy) in enumerate(plans, start=1):
        with_lookahead = f", lookahead {lookahead}" if lookahead else ""
        on_progress(f"simulating {number} of {len(plans)}: {decoding}{with_lookahead}")
        result = run_simulation(scenario, num_tokens=num_tokens, lookahead=lookahead, make_policy=make_policy)
        # The first contender is plain decoding.
        plain = contenders[0].result if contenders else result
        contenders.append(SimulatedContender(decoding, lookahead, result.speed / plain.speed, result))
    return Comparison(scenario, num_tokens, contenders)


def _plans(lookaheads: Sequence[int]) -> Iterator[tuple[Decoding, int | Literal["auto"], MakePolicy]]:
    """The way of decoding, the lookahead and the policy of each contender."""
    from actors.drafters.drafter import policy_by_settings
    from protocol.auto_policy import AutoPolicy
    from protocol.lookahead_policy import ChainPolicy

    def sequential(lookahead: int) -> MakePolicy:
        return lambda settings, prices: ChainPolicy(lookahead, overlaps=False)

    def single_chain(settings: Settings, prices: Prices) -> Policy:
        tree = policy_by_settings(settings, prices)
        assert isinstance(tree, AutoPolicy)
        return attrs.evolve(tree, num_guesses=1)

    yield "plain", 0, policy_by_settings
    for lookahead in lookaheads:
        yield "sequential", lookahead, sequential(lookahead)
    yield "single chain", "auto", single_chain
    yield "tree", "auto", policy_by_settings


def described(scenario: Scenario) -> str:
    """A scenario in one line; fields beyond the usual four only where they differ from their defaults."""
    words = [
        f"acceptance {scenario.acceptance:g}",
        f"cost ratio {scenario.cost_ratio:g}",
        f"contention {scenario.contention:g}",
        _described_table("verify", scenario.verify_table) or f"verify slope {scenario.verify_slope:g}",
    ]
    if scenario.draft_table:
        words.append(_described_table("draft", scenario.draft_table))
    fields = attrs.fields_dict(type(scenario))
    for name in ("draft_slope", "overhead", "second_choice", "spread", "overconfidence"):
        if (value := getattr(scenario, name)) != fields[name].default:
            words.append(f"{name.replace('_', ' ')} {value:g}")
    if scenario.stale_acceptance is not None:
        words.append(f"stale acceptance {scenario.stale_acceptance:g}")
    if scenario.sharding is not None:
        words.append(described_sharding(scenario.sharding, str(scenario.sharding.ranks)))
    return ", ".join(words)


def described_sharding(sharding: Sharding, ranks: str) -> str:
    """A sharding in one line, with `ranks` for its number of ranks."""
    return (
        f"ranks {ranks}, {sharding.all_reduce} of links with "
        f"{sharding.link_latency:g} µs and {sharding.link_bandwidth:g} Gbit/s, {sharding.layers} layers of "
        f"{sharding.hidden_size}, T_v(1) {sharding.pass_time:g} ms on one machine"
    )


def _described_table(role: str, table: tuple[tuple[int, float], ...]) -> str:
    """A table of times in a few words; "" for none."""
    if not table:
        return ""
    widths = "1 width" if len(table) == 1 else f"{len(table)} widths up to {table[-1][0]}"
    return f"{role} table of {widths}"
