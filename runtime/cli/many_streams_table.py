"""How the figures of `bench --streams` are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime.cli.bench_command import circumstances, or_dash
from runtime.terminal.display import printing
from runtime.terminal.tables import Row, Sheet, show_sections, show_table

if TYPE_CHECKING:
    from runtime.bench.many_streams import StreamsBenchmark, StreamsRow

_HEADINGS = (
    "streams",
    "",
    "tokens/s",
    "spread",
    "× one\nby one",
    "× batched",
    "busy",
    "a round",
    "proposed",
    "accepted",
    "hits",
    "drafted",
    "first",
    "longest\nwait",
    "same",
)


def print_streams(result: StreamsBenchmark) -> None:
    """Print what was measured, and where, on stdout.

    Raises: OutputError: it cannot be written.
    """
    with printing() as console:
        show_sections(console, [("bench", list(circumstances(result, "each")))])
        console.print()
        show_table(console, _sheet(result))
        console.print()
        for note in _notes(result):
            console.print(note, markup=False)


def _sheet(result: StreamsBenchmark) -> Sheet:
    rows = tuple(Row(tuple(_cells(row)), "bold" if row.kind == "at once" else "") for row in result.rows)
    return Sheet(_HEADINGS, rows, num_labels=2, is_grouped=True)


def _cells(row: StreamsRow) -> Iterator[str]:
    yield str(row.streams)
    yield row.name.removeprefix("outrider ").replace("one after another", "one by one")
    if row.median is None or row.low is None or row.high is None:
        yield "–" if row.failure is None else "failed"
        return
    yield f"{row.median:.1f}"
    yield f"{row.low:.1f}–{row.high:.1f}"
    yield or_dash(row.vs_one_after_another, ".2f")
    yield or_dash(row.vs_batched, ".2f")
    busy = row.target_busy is not None and row.draft_busy is not None
    yield f"{row.target_busy:.0%} {row.draft_busy:.0%}" if busy else "–"
    yield or_dash(row.tokens_per_round, ".2f")
    yield or_dash(row.proposal, ".2f")
    yield or_dash(row.acceptance, ".0%")
    yield or_dash(row.hit_rate, ".0%")
    yield or_dash(row.drafted_per_token, ".2f")
    yield _seconds(row.first_token)
    yield _seconds(row.longest_wait)
    yield "–" if row.same_texts is None else f"{row.same_texts}/{row.num_texts}"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def _notes(result: StreamsBenchmark) -> Iterator[str]:
    yield (
        "Speeds are tokens of all streams per second, from the call to the last token, "
        "prompts included: medians over "
        "repeats, with the slowest and the fastest. × one by one: of the same streams one after another on the same "
        "runtime. × batched: of mlx-lm's BatchGenerator, which cannot speculate."
    )
    yield (
        "busy: the target's and the drafter's thread. a round: tokens that a pass gave. proposed: tokens that were "
        "guessed for it. hits: verdicts whose text had been guessed ahead. drafted: draft steps for a token. first: "
        "from the call to a stream's first token, the median. longest wait: between two tokens of a stream, the worst "
        "of all. same: texts that are what mlx-lm decodes plainly for the prompt alone."
    )
    for name, why in dict.fromkeys((row.name, row.failure) for row in result.rows if row.failure is not None):
        yield f"{name} cannot run: {why}"
