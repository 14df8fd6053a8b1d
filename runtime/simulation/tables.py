"""The figures of a simulation as tables on stdout: of one text, and of several at once."""

from __future__ import annotations

from runtime.simulation.comparison import Comparison, described
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
    best = comparison.best_sequential
    rows = []
    for contender in comparison.contenders:
        counts, is_drafted = contender.result.statistics, contender.decoding != "plain"
        cells = (
            contender.decoding,
            str(contender.lookahead) if is_drafted else "–",
            f"{contender.speed:.2f}×",
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
        TextTable(_HEADINGS, tuple(rows), num_labels=2),
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


def _print(heading: str, table: TextTable, conclusion: str) -> None:
    with printing() as console:
        console.print(heading, style="dim")
        show_table(console, table)
        console.print(conclusion)
