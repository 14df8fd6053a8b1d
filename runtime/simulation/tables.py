"""The figures of a simulation as tables on stdout: of one text, of several at once, and of several numbers of ranks."""

from __future__ import annotations

import attrs

from runtime.simulation.comparison import Comparison, SimulatedContender, described, described_sharding
from runtime.simulation.ranks_comparison import RanksComparison
from runtime.simulation.streams_comparison import StreamsComparison
from runtime.terminal.display import printing
from runtime.terminal.tables import TableRow, TextTable, show_table

_HEADINGS = (
    "decoding",
    "lookahead",
    "speed",
    "tokens\na round",
    "accepted",
    "hits",
    "target\nbusy",
    "draft\nbusy",
    "",
)


def print_comparison(comparison: Comparison) -> None:
    """Print the ways of decoding one text.

    Raises: OutputError: they cannot be written.
    """
    best, is_sharded = comparison.best_sequential, comparison.scenario.sharding is not None
    headings = (*_HEADINGS[:3], "tokens/s", *_HEADINGS[3:]) if is_sharded else _HEADINGS
    rows = []
    for contender in comparison.contenders:
        counts, is_drafted = contender.result.statistics, contender.decoding != "plain"
        rate = comparison.tokens_per_second(contender)
        cells = (
            contender.decoding,
            str(contender.lookahead) if is_drafted else "–",
            f"{contender.speed:.2f}×",
            *([] if rate is None else [f"{rate:.1f}"]),
            f"{counts.tokens_per_round:.2f}",
            "–" if counts.acceptance_rate is None else f"{counts.acceptance_rate:.0%}",
            f"{contender.hit_rate:.0%}" if is_drafted else "–",
            f"{counts.target_busy:.0%}",
            f"{counts.draft_busy:.0%}" if is_drafted else "–",
            "best" if contender is best else "",
        )
        rows.append(TableRow(cells, "bold" if contender.decoding == "tree" or contender is best else ""))
    _print(
        f"{described(comparison.scenario)}; {comparison.num_tokens:,} tokens, seed {comparison.scenario.seed}",
        TextTable(headings, tuple(rows), num_labels=2),
        f"the tree is {comparison.gain:.2f} times as fast as the best sequential decoding, lookahead {best.lookahead}",
    )


_STREAM_HEADINGS = (
    "decoding",
    "lookahead",
    "speed",
    "steady\nspeed",
    "texts\na pass",
    "rows\na pass",
    "longest\nwait",
    "target\nbusy",
    "",
)


def print_streams_comparison(comparison: StreamsComparison) -> None:
    """Print the ways of decoding several texts at once.

    Raises: OutputError: they cannot be written.
    """
    best = comparison.best_fixed
    rows = []
    for contender in comparison.contenders:
        result = contender.result
        cells = (
            contender.decoding,
            "–" if contender.decoding == "plain batches" else str(contender.lookahead),
            f"{contender.speed:.2f}×",
            f"{contender.steady_speed:.2f}×",
            f"{result.texts_per_pass:.1f}",
            f"{result.rows_per_pass:.1f}",
            f"{contender.longest_wait:.1f}",
            f"{result.target_busy:.0%}",
            "best" if contender is best else "",
        )
        rows.append(TableRow(cells, "bold" if contender is comparison.auto or contender is best else ""))
    streams = "1 stream" if comparison.num_streams == 1 else f"{comparison.num_streams} streams"
    _print(
        f"{described(comparison.scenario)}; {streams} of {comparison.num_tokens:,} tokens, "
        f"seed {comparison.scenario.seed}",
        TextTable(_STREAM_HEADINGS, tuple(rows), num_labels=2),
        f"while all streams are at work, shared passes with the automatic lookahead are {comparison.over_plain:.2f} "
        f"times as fast as plain batches, and {comparison.over_turns:.2f} times as fast as turns",
    )


_RANKS_HEADINGS = (
    "ranks",
    "pass of\n1 token",
    "of it\nlinks",
    "pass of\n8 tokens",
    "plain\ntokens/s",
    "best\nlookahead",
    "with it\ntokens/s",
    "auto\ntokens/s",
    "gain",
)


def print_ranks_comparison(comparison: RanksComparison) -> None:
    """Print what each number of ranks brings.

    Raises: OutputError: they cannot be written.
    """

    def rate(contender: SimulatedContender) -> str:
        return f"{contender.result.speed * 1000.0 / pass_time:.1f}"

    first = comparison.rows[0].comparison
    sharding = comparison.rows[0].sharding
    pass_time, ranks = sharding.pass_time, ",".join(str(row.sharding.ranks) for row in comparison.rows)
    fastest = max(comparison.rows, key=lambda row: row.auto.result.speed)
    rows = []
    for row in comparison.rows:
        best = row.comparison.best_sequential
        cells = (
            str(row.sharding.ranks),
            f"{row.pass_ms(1):.1f} ms",
            f"{row.sharding.exchange_ms(1):.1f} ms",
            f"{row.pass_ms(8):.1f} ms",
            rate(row.plain),
            str(best.lookahead),
            rate(best),
            rate(row.auto),
            f"{row.auto.speed:.2f}×",
        )
        rows.append(TableRow(cells, "bold" if row is fastest else ""))
    _print(
        f"{described(attrs.evolve(first.scenario, sharding=None))}, {described_sharding(sharding, ranks)}; "
        f"{first.num_tokens:,} tokens, seed {first.scenario.seed}",
        TextTable(_RANKS_HEADINGS, tuple(rows)),
        f"with speculation at the automatic lookahead, {fastest.sharding.ranks} ranks are the fastest",
    )


def _print(heading: str, table: TextTable, conclusion: str) -> None:
    with printing() as console:
        console.print(heading, style="dim")
        show_table(console, table)
        console.print(conclusion)
