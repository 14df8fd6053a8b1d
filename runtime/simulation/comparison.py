"""Comparisons of ways of decoding in simulated time: of one text, of several at once, and over numbers of ranks.

Nothing here imports mlx before something is compared, so that arguments can be checked first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs

from runtime.measuring.figures import Figure, Record, ratio, record_of, table_of
from runtime.measuring.plots import Bar, Plot
from runtime.measuring.reports import Report
from runtime.simulation.scenario import Scenario, described
from runtime.simulation.sharding import Sharding, described_sharding

if TYPE_CHECKING:
    from actors.drafters.drafter import MakePolicy
    from protocol.lookahead_policy import Policy
    from protocol.prices import Prices
    from protocol.settings import Settings

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16)
NUM_TOKENS = 1000
STREAM_LOOKAHEADS = (1, 2, 4, 8)
STREAM_TOKENS = 100

Progress = Callable[[str], None]


@attrs.frozen
class Simulated:
    """A contender, its result and that of plain decoding, from which a row's figures are computed."""

    scenario: Scenario
    decoding: str
    lookahead: int | Literal["auto"]
    result: Any
    plain: Any


@attrs.frozen
class Comparison:
    """Ways of decoding in one scenario.

    Attributes:
        rows: the figures of each way. Plain decoding comes first, and "auto", which is compared with the others, last.
    """

    scenario: Scenario
    num_tokens: int  # length of each text
    rows: Sequence[Record]

    figures: ClassVar[Sequence[Figure]]
    fixed: ClassVar[str]  # the decoding with fixed lookaheads
    speed: ClassVar[str] = "speed"  # the figure that is compared
    unit: ClassVar[str]  # of that figure

    def of(self, decoding: str) -> list[Record]:
        """The rows of one way of decoding."""
        return [row for row in self.rows if row.decoding == decoding]

    def over(self, other: Record) -> float:
        """How many times as fast as another row the last one is."""
        return float(getattr(self.rows[-1], self.speed) / getattr(other, self.speed))

    @property
    def best(self) -> Record:
        """The fastest fixed lookahead, chosen in hindsight."""
        return max(
            (row for row in self.of(self.fixed) if row.lookahead != "auto"), key=lambda row: getattr(row, self.speed)
        )

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object."""
        return {
            "scenario": attrs.asdict(self.scenario),
            "tokens": self.num_tokens,
            "contenders": [row.as_json() for row in self.rows],
            **self._conclusion(),
        }

    def _conclusion(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _texts(self) -> str:
        return f"{self.num_tokens:,} tokens"

    @property
    def _heading(self) -> str:
        return f"{described(self.scenario)}; {self._texts}, seed {self.scenario.seed}"

    def plot(self) -> Plot:
        """The speeds, to be drawn."""

        def bar(row: Record) -> Bar:
            speed = getattr(row, self.speed)
            label = _named(row.decoding, row.lookahead)
            return Bar(label, speed, speed, speed, f"{speed:.2f}×", stands_out=row is self.rows[-1])

        return Plot(self._heading, self.unit, [bar(row) for row in self.rows])

    def _report(self, conclusion: str) -> Report:
        best, last = self.best, self.rows[-1]
        is_sharded = self.scenario.sharding is not None
        figures = [figure for figure in self.figures if figure.name != "tokens_per_second" or is_sharded]
        figures.append(Figure(heading="", show=lambda row: "best" if row is best else ""))
        return Report(
            table_of(figures, self.rows, is_bold=lambda row: row is best or row is last, num_labels=2),
            heading=self._heading,
            notes=[conclusion],
        )


def _named(decoding: str, lookahead: int | Literal["auto"]) -> str:
    return f"{decoding}, lookahead {lookahead}" if lookahead else decoding


def _is_plain(row: Record) -> bool:
    return bool(row.decoding in ("plain", "plain batches"))


def _hit_rate(simulated: Simulated) -> float:
    counts = simulated.result.statistics
    return ratio(counts.lookahead_hits, counts.lookahead_hits + counts.lookahead_misses) or 0.0


def _tokens_per_second(simulated: Simulated) -> float | None:
    sharding = simulated.scenario.sharding
    return None if sharding is None else float(simulated.result.speed * 1000.0 / sharding.pass_time)


def _counted(name: str, heading: str | None = None, show: str | Callable[[Record], str] = "") -> Figure:
    return Figure(name, lambda simulated: getattr(simulated.result.statistics, name), heading, show)


def _found(name: str, heading: str | None = None, show: str | Callable[[Record], str] = "") -> Figure:
    return Figure(name, lambda simulated: getattr(simulated.result, name), heading, show)


_LABELS = (
    Figure("decoding", lambda simulated: simulated.decoding, "decoding", "s"),
    Figure(
        "lookahead",
        lambda simulated: simulated.lookahead,
        "lookahead",
        lambda row: "–" if _is_plain(row) else str(row.lookahead),
    ),
)


# --- one text -------------------------------------------------------------------------------------


class TextComparison(Comparison):
    """Ways of decoding one text.

    "plain" has no drafter; "sequential" drafts and verifies in turn; "single chain" drafts ahead while a verify pass
    runs; "tree" also drafts ahead for corrections.
    """

    fixed = "sequential"
    unit = "tokens per second (plain decoding = 1)"
    figures = (
        *_LABELS,
        # Tokens per second, relative to plain decoding.
        Figure("speed", lambda s: s.result.speed / s.plain.speed, "speed", "{:.2f}×"),
        Figure("tokens_per_second", _tokens_per_second, "tokens/s", ".1f"),
        _counted("tokens_per_round", "tokens\na round", ".2f"),
        _counted("acceptance_rate", "accepted", ".0%"),
        _counted("fresh_acceptance"),
        _counted("stale_acceptance"),
        # Share of verdicts whose text had been drafted ahead.
        Figure("hit_rate", _hit_rate, "hits", lambda row: "–" if _is_plain(row) else f"{row.hit_rate:.0%}"),
        _counted("target_busy", "target\nbusy", ".0%"),
        _counted("draft_busy", "draft\nbusy", lambda row: "–" if _is_plain(row) else f"{row.draft_busy:.0%}"),
    )

    def _conclusion(self) -> dict[str, Any]:
        return {
            "best_sequential_lookahead": self.best.lookahead,
            "tree_over_best_sequential": self.over(self.best),
        }

    def report(self) -> Report:
        """The report to print."""
        return self._report(
            f"the tree is {self.over(self.best):.2f} times as fast as the best sequential decoding, lookahead "
            f"{self.best.lookahead}",
        )


def compare(
    scenario: Scenario,
    num_tokens: int = NUM_TOKENS,
    lookaheads: Sequence[int] = LOOKAHEADS,
    on_progress: Progress = lambda _: None,
) -> TextComparison:
    """Decode one text of `num_tokens` in each way; `lookaheads` are those of the sequential contenders."""
    from actors.drafters.drafter import policy_by_settings
    from protocol.auto_policy import AutoPolicy
    from protocol.lookahead_policy import ChainPolicy
    from runtime.simulation.simulation import run_simulation

    def sequential(lookahead: int) -> MakePolicy:
        return lambda settings, prices: ChainPolicy(lookahead, overlaps=False)

    def single_chain(settings: Settings, prices: Prices) -> Policy:
        tree = policy_by_settings(settings, prices)
        assert isinstance(tree, AutoPolicy)
        return attrs.evolve(tree, num_guesses=1)

    ways: list[Way] = [("plain", 0, {})]
    ways += [("sequential", lookahead, {"make_policy": sequential(lookahead)}) for lookahead in lookaheads]
    ways += [("single chain", "auto", {"make_policy": single_chain}), ("tree", "auto", {})]

    def run(**way: Any) -> Any:
        return run_simulation(scenario, num_tokens=num_tokens, **way)

    return TextComparison(scenario, num_tokens, _rows(TextComparison, scenario, ways, run, on_progress))


# --- several texts at once ------------------------------------------------------------------------


def _relative(name: str) -> Callable[[Simulated], float]:
    return lambda simulated: getattr(simulated.result, name) * simulated.scenario.verify_seconds(1)


@attrs.frozen
class StreamsComparison(Comparison):
    """Ways of decoding several texts at once.

    "plain batches" have no drafter, and a token of every text in each pass; "in turns" gives each text passes of its
    own; "shared" verifies proposals of several texts in one pass.
    """

    num_streams: int = 1
    fixed = "shared"
    speed = "steady_speed"
    unit = "tokens of all streams per second (plain decoding of one = 1)"
    figures = (
        *_LABELS,
        # Tokens of all texts, from the call to the last token of all; and up to the end of the text that ends first.
        Figure("speed", _relative("speed"), "speed", "{:.2f}×"),
        Figure("steady_speed", _relative("steady_speed"), "steady\nspeed", "{:.2f}×"),
        _found("texts_per_pass", "texts\na pass", ".1f"),
        _found("rows_per_pass", "rows\na pass", ".1f"),
        # In decoding steps of one text alone.
        Figure("longest_wait", lambda s: s.result.longest_wait / s.scenario.verify_seconds(1), "longest\nwait", ".1f"),
        _found("proposal"),
        _found("acceptance_rate"),
        _found("target_busy", "target\nbusy", ".0%"),
        _found("draft_busy"),
    )

    def as_json(self) -> dict[str, Any]:
        return {"streams": self.num_streams, **super().as_json()}

    def _conclusion(self) -> dict[str, Any]:
        plain, turns = self.rows[:2]
        return {
            "best_fixed_lookahead": self.best.lookahead,
            "auto_over_plain_batches": self.over(plain),
            "auto_over_turns": self.over(turns),
        }

    @property
    def _texts(self) -> str:
        return f"{self.num_streams} stream{'s' * (self.num_streams > 1)} of {super()._texts}"

    def report(self) -> Report:
        """The report to print."""
        plain, turns = self.rows[:2]
        return self._report(
            "while all streams are at work, shared passes with the automatic lookahead are "
            f"{self.over(plain):.2f} times as fast as plain batches, and {self.over(turns):.2f} times as fast as turns",
        )


def compare_streams(
    scenario: Scenario,
    num_streams: int,
    num_tokens: int = STREAM_TOKENS,
    lookaheads: Sequence[int] = STREAM_LOOKAHEADS,
    on_progress: Progress = lambda _: None,
) -> StreamsComparison:
    """Decode several texts at once in each way; `lookaheads` are those of the shared passes.

    Raises: SettingsError: an argument is out of its range.
    """
    from runtime.simulation.simulation import simulate_streams

    ways: list[Way] = [("plain batches", 0, {}), ("in turns", "auto", {"max_batch": 1})]
    ways += [*(("shared", lookahead, {}) for lookahead in lookaheads), ("shared", "auto", {})]

    def run(**way: Any) -> Any:
        return simulate_streams(scenario, num_streams, num_tokens=num_tokens, **way)

    rows = _rows(StreamsComparison, scenario, ways, run, on_progress)
    return StreamsComparison(scenario, num_tokens, rows, num_streams)


# The decoding, its lookahead, and further arguments of the simulation.
Way = tuple[str, int | Literal["auto"], Mapping[str, Any]]


def _rows(
    kind: type[Comparison], scenario: Scenario, ways: Sequence[Way], run: Callable[..., Any], on_progress: Progress
) -> list[Record]:
    results: list[Any] = []
    for number, (decoding, lookahead, options) in enumerate(ways, start=1):
        on_progress(f"simulating {number} of {len(ways)}: {_named(decoding, lookahead)}")
        results.append(run(lookahead=lookahead, **options))
    return [
        record_of(kind.figures, Simulated(scenario, decoding, lookahead, result, results[0]))
        for (decoding, lookahead, _), result in zip(ways, results, strict=True)
    ]


# --- numbers of ranks -----------------------------------------------------------------------------


@attrs.frozen
class RanksComparison:
    """Several numbers of ranks, in otherwise the same scenario, and the ways of decoding one text with each."""

    comparisons: Sequence[TextComparison]

    figures = (
        Figure("ranks", lambda compared: _sharding(compared).ranks, "ranks", "d"),
        Figure("pass_ms", lambda compared: _pass_ms(compared, 1), "pass of\n1 token", "{:.1f} ms"),
        Figure("exchange_ms", lambda compared: _sharding(compared).exchange_ms(1), "of it\nlinks", "{:.1f} ms"),
        Figure("pass_ms_of_8_tokens", lambda compared: _pass_ms(compared, 8), "pass of\n8 tokens", "{:.1f} ms"),
        Figure("plain", lambda compared: compared.rows[0].tokens_per_second, "plain\ntokens/s", ".1f"),
        Figure("best_lookahead", lambda compared: compared.best.lookahead, "best\nlookahead", "d"),
        Figure("best", lambda compared: compared.best.tokens_per_second, "with it\ntokens/s", ".1f"),
        Figure("auto", lambda compared: compared.rows[-1].tokens_per_second, "auto\ntokens/s", ".1f"),
        Figure("gain", lambda compared: compared.rows[-1].speed, "gain", "{:.2f}×"),
    )

    @property
    def rows(self) -> list[Record]:
        """The figures for each number of ranks."""
        return [record_of(self.figures, compared) for compared in self.comparisons]

    def as_json(self) -> dict[str, Any]:
        """The comparison as a JSON object: for each number of ranks, its pass times and the ways of decoding."""
        return {
            "ranks": [
                record_of(self.figures[:4], compared).as_json() | compared.as_json() for compared in self.comparisons
            ]
        }

    def report(self) -> Report:
        """The report to print."""
        first, rows = self.comparisons[0], self.rows
        fastest = max(rows, key=lambda row: row.auto)
        ranks = ",".join(str(row.ranks) for row in rows)
        return Report(
            table_of(self.figures, rows, is_bold=lambda row: row is fastest),
            heading=f"{described(attrs.evolve(first.scenario, sharding=None))}, "
            f"{described_sharding(_sharding(first), ranks)}; {first.num_tokens:,} tokens, seed {first.scenario.seed}",
            notes=[f"with speculation at the automatic lookahead, {fastest.ranks} ranks are the fastest"],
        )


def _sharding(compared: Comparison) -> Sharding:
    assert compared.scenario.sharding is not None
    return compared.scenario.sharding


def _pass_ms(compared: Comparison, num_tokens: int) -> float:
    return compared.scenario.verify_seconds(num_tokens) * _sharding(compared).pass_time


def compare_ranks(
    scenario: Scenario,
    ranks: Sequence[int],
    num_tokens: int = NUM_TOKENS,
    lookaheads: Sequence[int] = LOOKAHEADS,
    on_progress: Progress = lambda _: None,
) -> RanksComparison:
    """Decode one text in each way with each number of ranks; the number in the scenario's sharding is ignored."""
    assert scenario.sharding is not None
    sharding, comparisons = scenario.sharding, []
    for number in ranks:
        sharded = attrs.evolve(scenario, sharding=attrs.evolve(sharding, ranks=number))

        def announce(text: str, number: int = number) -> None:
            on_progress(f"{number} ranks: {text}")

        comparisons.append(compare(sharded, num_tokens, lookaheads, announce))
    return RanksComparison(comparisons)
