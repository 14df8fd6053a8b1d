"""Ways of decoding one text, compared in simulated time; what `outrider simulate` prints and plots.

The models' libraries take seconds to import, so they are imported when a comparison begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from protocol.settings import Settings

if TYPE_CHECKING:
    from actors.drafters.drafter import MakePolicy
    from protocol.lookahead_policy import Policy
    from protocol.prices import Prices
    from runtime.simulation.simulation import Played, Scenario

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16)
NUM_TOKENS = 1000

Decoding = Literal["plain", "sequential", "single chain", "tree"]


@attrs.frozen
class Contender:
    """A way of decoding, and how it fared.

    Attributes:
        decoding: "plain"; "sequential", which drafts and verifies in turn; "single chain", which drafts ahead while
            a verdict is due; "tree", which also drafts for corrections.
        lookahead: most tokens in a proposal, or "auto".
        speed: tokens per second, relative to plain decoding.
        played: what came of it.
    """

    decoding: Decoding
    lookahead: int | Literal["auto"]
    speed: float
    played: Played

    @property
    def hit_rate(self) -> float:
        """The part of the verdicts whose text had been drafted for; 0 where there were none."""
        counts = self.played.statistics
        verdicts = counts.lookahead_hits + counts.lookahead_misses
        return counts.lookahead_hits / verdicts if verdicts else 0.0

    def as_json(self) -> dict[str, Any]:
        """For machines to read."""
        counts = self.played.statistics
        return {
            "decoding": self.decoding,
            "lookahead": self.lookahead,
            "speed": self.speed,
            "tokens_per_round": counts.tokens_per_round,
            "acceptance_rate": counts.acceptance_rate,
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
        contenders: plain decoding first, and the tree last.
    """

    scenario: Scenario
    num_tokens: int
    contenders: Sequence[Contender]

    def of(self, decoding: Decoding) -> list[Contender]:
        """The contenders of one kind."""
        return [contender for contender in self.contenders if contender.decoding == decoding]

    @property
    def best_sequential(self) -> Contender:
        """The fastest sequential one, chosen with hindsight."""
        return max(self.of("sequential"), key=lambda contender: contender.speed)

    @property
    def gain(self) -> float:
        """The speed of the tree over that of the best sequential one."""
        return self.of("tree")[0].speed / self.best_sequential.speed

    def as_json(self) -> dict[str, Any]:
        """For machines to read."""
        return {
            "scenario": attrs.asdict(self.scenario),
            "tokens": self.num_tokens,
            "contenders": [contender.as_json() for contender in self.contenders],
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
        lookaheads: of the sequential ways, each in [1, 64]; at least one.
        on_progress: called with what is being done.
    """
    from runtime.simulation.simulation import played

    contenders: list[Contender] = []
    ways = list(_ways(lookaheads))
    for index, (decoding, lookahead, setting, make_policy) in enumerate(ways, start=1):
        with_lookahead = f", lookahead {lookahead}" if lookahead else ""
        on_progress(f"simulating {index} of {len(ways)}: {decoding}{with_lookahead}")
        result = played(scenario, num_tokens=num_tokens, lookahead=setting, make_policy=make_policy)
        # The first is plain decoding.
        plain = contenders[0].played if contenders else result
        contenders.append(Contender(decoding, lookahead, result.speed / plain.speed, result))
    return Comparison(scenario, num_tokens, contenders)


def _ways(
    lookaheads: Sequence[int],
) -> Iterator[tuple[Decoding, int | Literal["auto"], int | Literal["auto"], MakePolicy]]:
    """Each way of decoding: its name, its lookahead, the setting for it, and its policy."""
    from actors.drafters.drafter import policy_by_settings
    from protocol.lookahead_policy import AutoPolicy, ChainPolicy

    def sequential(lookahead: int) -> MakePolicy:
        return lambda settings, prices: ChainPolicy(lookahead, overlaps=False)

    def single_chain(settings: Settings, prices: Prices) -> Policy:
        tree = policy_by_settings(settings, prices)
        assert isinstance(tree, AutoPolicy)
        return attrs.evolve(tree, num_guesses=1)

    yield "plain", 0, 0, policy_by_settings
    for lookahead in lookaheads:
        yield "sequential", lookahead, lookahead, sequential(lookahead)
    yield "single chain", "auto", "auto", single_chain
    yield "tree", "auto", "auto", policy_by_settings


def in_words(scenario: Scenario) -> str:
    """A scenario in one line."""
    words = [
        f"acceptance {scenario.acceptance:g}",
        f"cost ratio {scenario.cost_ratio:g}",
        f"contention {scenario.contention:g}",
        f"verify slope {scenario.verify_slope:g}",
    ]
    usual = attrs.fields_dict(type(scenario))
    for name in ("draft_slope", "overhead", "second_choice", "spread", "overconfidence"):
        if (value := getattr(scenario, name)) != usual[name].default:
            words.append(f"{name.replace('_', ' ')} {value:g}")
    return ", ".join(words)
