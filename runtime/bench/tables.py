"""The figures of a benchmark as tables on stdout: of one stream, and of many streams at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runtime.terminal.display import printing
from runtime.terminal.tables import TableRow, TextTable, show_sections, show_table

if TYPE_CHECKING:
    from runtime.bench.many_streams import StreamsBenchmark, StreamsRow
    from runtime.bench.one_stream import Benchmark, ContenderRow
    from runtime.bench.overhead import Overhead, OverheadRow

# --- one stream -----------------------------------------------------------------------------------


def print_one_stream(result: Benchmark) -> None:
    """Print the results and the circumstances of a benchmark on stdout.

    Raises: OutputError: it cannot be written.
    """
    with printing() as console:
        show_sections(console, [("bench", list(_circumstances(result, result.num_prompts)))])
        console.print()
        show_table(console, one_stream_table(result))
        if notes := list(_one_stream_notes(result)):
            console.print()
            for note in notes:
                console.print(note, markup=False)
        sections = [(f"measured by {row.name}", list(_estimates(row))) for row in _rows_with_estimates(result)]
        if sections:
            console.print()
            show_sections(console, sections)


_ONE_STREAM_HEADINGS = (
    "",
    "tokens/s",
    "spread",
    "× plain",
    "× best",
    "accepted",
    "a round",
    "hits",
    "busy",
    "of limit",
    "same",
)


def one_stream_table(result: Benchmark) -> TextTable:
    """One row for each contender; the best speculative one of mlx-lm and the automatic lookahead are bold."""
    rows = tuple(
        TableRow(tuple(_one_stream_cells(row)), "bold" if _stands_out(row, result) else "") for row in result.rows
    )
    return TextTable(_ONE_STREAM_HEADINGS, rows)


def _stands_out(row: ContenderRow, result: Benchmark) -> bool:
    return row.name == result.best_speculative or (row.engine == "outrider" and row.lookahead == "auto")


def _one_stream_cells(row: ContenderRow) -> Iterator[str]:
    yield row.name
    if row.median is None or row.low is None or row.high is None:
        yield "–" if row.failure is None else "failed"
        return
    yield f"{row.median:.1f}"
    yield f"{row.low:.1f}–{row.high:.1f}"
    yield _or_dash(row.vs_plain, ".2f")
    yield _or_dash(row.vs_best_speculative, ".2f")
    stale = "" if row.stale_acceptance is None else f" ({row.stale_acceptance:.0%})"
    yield _or_dash(row.acceptance, ".0%") + stale
    yield _or_dash(row.tokens_per_round, ".2f")
    yield _or_dash(row.hit_rate, ".0%")
    busy = row.target_busy is not None and row.draft_busy is not None
    yield f"{row.target_busy:.0%} {row.draft_busy:.0%}" if busy else "–"
    yield _or_dash(row.of_limit, ".2f")
    yield "–" if row.same_texts is None else f"{row.same_texts}/{row.num_texts}"


def _one_stream_notes(result: Benchmark) -> Iterator[str]:
    if result.num_ranks > 1:
        yield (
            "mlx-lm's own decoding is left out: on a target that is sharded over ranks it would have to run on all of "
            "them at once, and it does not speculate there. × plain is over this runtime's plain decoding."
        )
    yield (
        "Speeds are medians over repeats, timed from the end of the first round, with the slowest and the fastest. "
        "× best: over mlx-lm's fastest speculative row, chosen in hindsight"
        + (f" ({result.best_speculative})." if result.best_speculative else " (there is none).")
    )
    yield (
        "busy: share of the time in which the target's and the drafter's threads worked. of limit: speed over what "
        "the target's passes alone would give if drafting were free. same: texts equal to "
        + ("the plain greedy ones." if result.num_ranks > 1 else "mlx-lm's plain greedy ones.")
    )
    if any(row.stale_acceptance is not None for row in result.rows):
        yield (
            "accepted: in brackets, of the tokens that a trained drafter had drafted ahead, without hidden states that "
            "the target had given by the time they were proposed."
        )
    for row in result.rows:
        if row.failure is not None:
            yield f"{row.name} cannot run: {row.failure}"


def _rows_with_estimates(result: Benchmark) -> Iterator[ContenderRow]:
    """The rows whose estimates are shown: those with the automatic lookahead, else the last row that has any."""
    rows = [row for row in result.rows if row.estimates]
    return iter([row for row in rows if row.lookahead == "auto"] or rows[-1:])


def _estimates(row: ContenderRow) -> Iterator[tuple[str, str]]:
    for name, value in (row.estimates or {}).items():
        if isinstance(value, tuple):
            text = ", ".join(f"{seconds * 1e3:.2f} ms for {width}" for width, seconds in value)
        elif "seconds" in name and "per_second" not in name:
            text = f"{value * 1e3:.2f} ms"
        else:
            text = f"{value:.3g}"
        yield name.replace("_seconds", "").replace("_", " "), text


# --- many streams ---------------------------------------------------------------------------------

_MANY_STREAMS_HEADINGS = (
    "streams",
    "",
    "tokens/s",
    "spread",
    "× one\nby one",
    "× in\nturns",
    "×\nbatched",
    "streams\na pass",
    "first",
    "longest\nwait",
    "memory",
    "same",
    "busy",
    "a round",
    "proposed",
    "accepted",
    "hits",
    "drafted",
)


def print_many_streams(result: StreamsBenchmark) -> None:
    """Print the results and the circumstances of a benchmark on stdout.

    Raises: OutputError: it cannot be written.
    """
    with printing() as console:
        show_sections(console, [("bench", list(_circumstances(result, "each")))])
        console.print()
        show_table(console, many_streams_table(result))
        console.print()
        for note in _many_streams_notes(result):
            console.print(note, markup=False)


def many_streams_table(result: StreamsBenchmark) -> TextTable:
    """One row for each number of streams and contender, grouped by number of streams."""
    rows = tuple(
        TableRow(tuple(_many_streams_cells(row)), "bold" if row.kind == "at once" else "") for row in result.rows
    )
    return TextTable(_MANY_STREAMS_HEADINGS, rows, num_labels=2, is_grouped=True)


def _many_streams_cells(row: StreamsRow) -> Iterator[str]:
    yield str(row.streams)
    yield row.name.removeprefix("outrider ").removeprefix("mlx-lm ").replace("one after another", "one by one")
    if row.median is None or row.low is None or row.high is None:
        yield "–" if row.failure is None else "failed"
        return
    yield f"{row.median:.1f}"
    yield f"{row.low:.1f}–{row.high:.1f}"
    yield _or_dash(row.vs_one_after_another, ".2f")
    yield _or_dash(row.vs_in_turns, ".2f")
    yield _or_dash(row.vs_batched, ".2f")
    yield _or_dash(row.rows_per_pass, ".2f")
    yield _seconds(row.first_token)
    yield _seconds(row.longest_wait)
    yield _size(row.peak_bytes)
    yield "–" if row.same_texts is None else f"{row.same_texts}/{row.num_texts}"
    busy = row.target_busy is not None and row.draft_busy is not None
    yield f"{row.target_busy:.0%} {row.draft_busy:.0%}" if busy else "–"
    yield _or_dash(row.tokens_per_round, ".2f")
    yield _or_dash(row.proposal, ".2f")
    yield _or_dash(row.acceptance, ".0%")
    yield _or_dash(row.hit_rate, ".0%")
    yield _or_dash(row.drafted_per_token, ".2f")


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "–"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s" if value >= 1.0 else f"{value * 1e3:.0f} ms"


def _many_streams_notes(result: StreamsBenchmark) -> Iterator[str]:
    yield (
        "Speeds are tokens of all streams per second, from the call to the last token, prompts included: medians over "
        "repeats, with the slowest and the fastest. × one by one: over the same streams one after another on the same "
        "runtime. × in turns: over the same streams at once with max_batch=1, each in passes of its own. × batched: "
        "over mlx-lm's BatchGenerator, which cannot speculate."
    )
    yield (
        "streams a pass: mean number of streams that shared a pass of the target. first: median time from the call to "
        "a stream's first token. longest wait: longest time between two tokens of a stream. memory: most that MLX held "
        "at once, beyond what it held before, so without the weights. same: texts equal to mlx-lm's plain decoding of "
        "the prompt alone."
    )
    yield (
        "busy: share of the time in which the target's and the drafter's threads worked. a round: tokens committed by "
        "a round of one stream. proposed: tokens proposed for it. hits: verdicts whose text had been drafted ahead. "
        "drafted: draft steps per token."
    )
    for name, why in dict.fromkeys((row.name, row.failure) for row in result.rows if row.failure is not None):
        yield f"{name} cannot run: {why}"


# --- the runtime itself ---------------------------------------------------------------------------


def print_overhead(result: Overhead) -> None:
    """Print the results and the circumstances of a benchmark on stdout.

    Raises: OutputError: it cannot be written.
    """
    about = [
        ("texts", f"of {result.max_tokens} tokens, greedy, after short prompts"),
        ("repeats", f"{result.repeats_done} of {result.repeats}"),
        *result.machine.items(),
    ]
    with printing() as console:
        show_sections(console, [("bench", about)])
        console.print()
        show_table(console, overhead_table(result))
        console.print()
        console.print(
            "Microseconds a token of all streams, from the call to the last token: medians over repeats, with the "
            "fastest and the slowest. The model has one layer of width 32, so that nearly all of this is Python. × "
            "mlx-lm: over generate_step for one stream, over BatchGenerator for more.",
            markup=False,
        )


def overhead_table(result: Overhead) -> TextTable:
    """One row for each number of streams and way to decode them."""
    rows = tuple(TableRow(tuple(_overhead_cells(row))) for row in result.rows)
    return TextTable(("streams", "", "µs a token", "spread", "× mlx-lm"), rows, num_labels=2, is_grouped=True)


def _overhead_cells(row: OverheadRow) -> Iterator[str]:
    yield str(row.streams)
    yield row.way
    yield _or_dash(row.median, ".1f")
    yield "–" if row.low is None or row.high is None else f"{row.low:.1f}–{row.high:.1f}"
    yield _or_dash(row.vs_mlx_lm, ".2f")


# --- both -----------------------------------------------------------------------------------------


def _circumstances(result: Benchmark | StreamsBenchmark, num_texts: int | str) -> Iterator[tuple[str, str]]:
    """Models, texts, repeats and machine, as rows of (name, value)."""
    yield "target", f"{result.target}, {', '.join(result.dtypes['target'])}"
    yield "draft", ", ".join([result.draft, *result.dtypes.get("draft", ())])
    for name, dtypes in result.dtypes.items():
        if name not in ("target", "draft"):
            yield "", f"{name}: {', '.join(dtypes)}"
    yield "texts", f"{num_texts} of {result.max_tokens} tokens, temperature {result.temperature:g}"
    cut = "" if result.is_complete else ", the last perhaps in part: it was interrupted"
    yield "repeats", f"{result.repeats_done} of {result.repeats}{cut}"
    yield from result.machine.items()


def _or_dash(value: float | None, form: str) -> str:
    """A number in a format; a dash for None."""
    return "–" if value is None else format(value, form)
