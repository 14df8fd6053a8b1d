"""The command `bench`: its arguments, and how its figures are shown. Nothing here imports mlx before it is needed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown
from runtime.cli.model_arguments import Models
from runtime.terminal.display import Display, Outcome, print_text, printing, say, warnings_at_the_end
from runtime.terminal.signals import quitting, until_signal
from runtime.terminal.tables import Row as TableRow
from runtime.terminal.tables import Sheet, show_sections, show_table

if TYPE_CHECKING:
    from runtime.bench.many_streams import StreamsBenchmark, StreamsMeasured, StreamsPlan
    from runtime.bench.one_stream import Benchmark, Measured, Plan, Row

PLOT_FORMATS = (".svg", ".png", ".pdf")


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be asked of `bench`, beside the models and the BLAS."""
    what = parser.add_argument_group("what to measure")
    prompts = what.add_mutually_exclusive_group()
    prompts.add_argument(
        "-p", "--prompt", metavar="TEXT", action="append", help="a text to continue; may be given more than once"
    )
    prompts.add_argument(
        "--prompts", metavar="FILE", help="texts to continue: a JSON list (FILE.json), or one a line (default: code)"
    )
    for names, metavar, default, text in (
        (("-m", "--max-tokens"), "N", "96", "tokens to generate for each prompt"),
        (("--repeats",), "N", "3", "how often each contender runs each prompt"),
        (("-t", "--temperature"), "T", "0", "0 is greedy"),
    ):
        what.add_argument(
            *names,
            metavar=metavar,
            type=_number,
            default=argparse.SUPPRESS,
            help=f"{text} (default: {default})",
        )
    what.add_argument("--temp", dest="temperature", type=_number, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    what.add_argument(
        "--num-draft-tokens",
        metavar="LIST",
        default=argparse.SUPPRESS,
        type=_list,
        help='for mlx-lm\'s speculative decoding; "none" leaves it out (default: 1,2,3,4,5,6,7,8)',
    )
    what.add_argument(
        "--lookahead",
        metavar="LIST",
        dest="lookaheads",
        default=argparse.SUPPRESS,
        type=_list,
        help="for this runtime (default: 0,1,2,3,4,6,8,auto)",
    )
    what.add_argument(
        "--streams",
        metavar="LIST",
        nargs="?",
        const="1,2,4,8,16",
        help="measure so many streams at once instead, against one after another and mlx-lm's BatchGenerator; without "
        "LIST, %(const)s; --lookahead is then of the streams (default: auto)",
    )
    what.add_argument(
        "--dtype",
        metavar="TYPE",
        type=lambda text: None if text == "none" else text,
        help="cast the models to float32, bfloat16 or float16 (default: none)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    output.add_argument("--plot", metavar="FILE", help=f"also draw the speeds ({', '.join(PLOT_FORMATS)})")


def _number(text: str) -> int | float | str:
    """A number where it is one; what else it may be, the library says."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _list(text: str) -> list[int | float | str]:
    return [] if text == "none" else [_number(part.strip()) for part in text.split(",")]


def _plan(arguments: argparse.Namespace) -> Plan | StreamsPlan:
    """What was asked for.

    Raises: SettingsError, PromptError: something is out of its range, or cannot be read.
    """
    from runtime.bench.many_streams import StreamsPlan
    from runtime.bench.one_stream import Plan

    kind = Plan if arguments.streams is None else StreamsPlan
    names = {field.name for field in attrs.fields(kind)}
    given = {name: value for name, value in vars(arguments).items() if name in names and name != "prompts"}
    if arguments.prompt is not None:
        given["prompts"] = arguments.prompt
    elif arguments.prompts is not None:
        given["prompts"] = read_prompts(Path(arguments.prompts))
    if arguments.streams is not None:
        given["streams"] = _list(arguments.streams)
        if "num_draft_tokens" in vars(arguments):
            raise SettingsError("num_draft_tokens is not for --streams: mlx-lm's BatchGenerator cannot speculate")
    return kind(**given)


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file.

    Raises: PromptError: it cannot be read, or has none.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else [line for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise PromptError(f"cannot read prompts from {path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(prompt, str) for prompt in found):
        raise PromptError(f"{path} must hold a JSON list of texts")
    if not found:
        raise PromptError(f"there is no prompt in {path}; give one a line")
    return found


def _check_plot(file: str | None) -> Path | None:
    """Where to draw, checked before anything is measured.

    Raises: SettingsError: it will not be possible.
    """
    if file is None:
        return None
    path = Path(file)
    if path.suffix not in PLOT_FORMATS:
        raise SettingsError(f"plot must be a file that ends in {', '.join(PLOT_FORMATS)}, got {shown(file)}")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"plot {shown(file)} is in no directory that exists; make {path.parent} first")
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError('plot needs matplotlib, which is not installed; pip install "outrider[plot]"')
    return path


# --- the command ----------------------------------------------------------------------------------


def bench(arguments: argparse.Namespace, models: Models) -> Outcome:
    """Measure, and show what came of it, also where it was cut short.

    Raises: OutriderError: the arguments make no sense; what fails later is in the outcome.
    """
    if models.draft is None:
        raise SettingsError("bench compares ways to speculate, and needs a draft model: give --draft")
    plot = _check_plot(arguments.plot)
    plan = _plan(arguments)
    measured, measuring = _measuring(plan, models.target, models.draft)
    outcome = Outcome()

    async def work() -> None:
        try:
            await measuring(display.doing)
        finally:
            if measured.result().is_complete:
                outcome.finish_reason = "length"

    with warnings_at_the_end(), Display() as display, quitting(display):
        trio.run(until_signal, work, outcome, display)
    _show(measured, outcome, arguments.json, plot)
    return outcome


def _measuring(
    plan: Plan | StreamsPlan, target: str | Path, draft: str | Path
) -> tuple[Measured | StreamsMeasured, Callable[[Callable[[str], None]], Awaitable[object]]]:
    """Where figures are collected, and what collects them, saying what it does."""
    from runtime.bench import many_streams
    from runtime.bench import one_stream as bench

    if isinstance(plan, many_streams.StreamsPlan):
        streams = many_streams.StreamsMeasured(plan)
        return streams, lambda say: many_streams.measure_streams(target, draft, measured=streams, on_progress=say)
    measured = bench.Measured(plan)
    return measured, lambda say: bench.measure(target, draft, measured=measured, on_progress=say)


def _show(measured: Measured | StreamsMeasured, outcome: Outcome, as_json: bool, plot: Path | None) -> None:
    from runtime.bench import plot as bench_plot
    from runtime.bench.many_streams import StreamsBenchmark as OfStreams
    from runtime.cli.many_streams_table import print_streams

    result = measured.result()
    if as_json:
        if outcome.failure is None or result.repeats_done:
            print_text(json.dumps(attrs.asdict(result)) + "\n")
    elif result.repeats_done:
        print_streams(result) if isinstance(result, OfStreams) else print_benchmark(result)
    if not result.repeats_done:
        if outcome.signal is not None:
            say("nothing was measured yet")
    elif plot is not None:
        bench_plot.draw_streams(result, plot) if isinstance(result, OfStreams) else bench_plot.draw(result, plot)


# --- in words -------------------------------------------------------------------------------------


def print_benchmark(result: Benchmark) -> None:
    """Print what was measured, and where, on stdout.

    Raises: OutputError: it cannot be written.
    """
    with printing() as console:
        show_sections(console, [("bench", list(circumstances(result, result.num_prompts)))])
        console.print()
        show_table(console, _sheet(result))
        if notes := list(_notes(result)):
            console.print()
            for note in notes:
                console.print(note, markup=False)
        sections = [(f"measured by {row.name}", list(_estimates(row))) for row in _told(result)]
        if sections:
            console.print()
            show_sections(console, sections)


def circumstances(result: Benchmark | StreamsBenchmark, num_texts: int | str) -> Iterator[tuple[str, str]]:
    """What was measured with, and how much of it."""
    yield "target", f"{result.target}, {', '.join(result.dtypes['target'])}"
    yield "draft", ", ".join([result.draft, *result.dtypes.get("draft", ())])
    yield "texts", f"{num_texts} of {result.max_tokens} tokens, temperature {result.temperature:g}"
    cut = "" if result.is_complete else ", the last perhaps in part: it was interrupted"
    yield "repeats", f"{result.repeats_done} of {result.repeats}{cut}"
    yield from result.machine.items()


_HEADINGS = ("", "tokens/s", "spread", "× plain", "× best", "accepted", "a round", "hits", "busy", "of limit", "same")


def _sheet(result: Benchmark) -> Sheet:
    told = (result.best_speculative, "outrider lookahead auto")
    rows = tuple(TableRow(tuple(_cells(row)), "bold" if row.name in told else "") for row in result.rows)
    return Sheet(_HEADINGS, rows)


def _cells(row: Row) -> Iterator[str]:
    yield row.name
    if row.median is None or row.low is None or row.high is None:
        yield "–" if row.failure is None else "failed"
        return
    yield f"{row.median:.1f}"
    yield f"{row.low:.1f}–{row.high:.1f}"
    yield or_dash(row.vs_plain, ".2f")
    yield or_dash(row.vs_best_speculative, ".2f")
    yield or_dash(row.acceptance, ".0%")
    yield or_dash(row.tokens_per_round, ".2f")
    yield or_dash(row.hit_rate, ".0%")
    busy = row.target_busy is not None and row.draft_busy is not None
    yield f"{row.target_busy:.0%} {row.draft_busy:.0%}" if busy else "–"
    yield or_dash(row.of_limit, ".2f")
    yield "–" if row.same_texts is None else f"{row.same_texts}/{row.num_texts}"


def or_dash(value: float | None, form: str) -> str:
    """A figure in some form; a dash where there is none."""
    return "–" if value is None else format(value, form)


def _notes(result: Benchmark) -> Iterator[str]:
    yield (
        "Speeds are medians over repeats, from the end of the first round on, with the slowest and the fastest. "
        "× best: of mlx-lm's fastest speculative row, chosen in hindsight"
        + (f" ({result.best_speculative})." if result.best_speculative else " (there is none).")
    )
    yield (
        "busy: the target's and the drafter's thread. of limit: of what the target's passes alone would give, were "
        "drafting free. same: texts that are mlx-lm's plain greedy ones."
    )
    for row in result.rows:
        if row.failure is not None:
            yield f"{row.name} cannot run: {row.failure}"


def _told(result: Benchmark) -> Iterator[Row]:
    """The rows whose estimates are shown: those of the rules that live by them, else the last that has any."""
    rows = [row for row in result.rows if row.estimates]
    return iter([row for row in rows if row.lookahead == "auto"] or rows[-1:])


def _estimates(row: Row) -> Iterator[tuple[str, str]]:
    for name, value in (row.estimates or {}).items():
        if not isinstance(value, (int, float)):
            text = str(value)
        elif "seconds" in name and "per_second" not in name:
            text = f"{value * 1e3:.2f} ms"
        else:
            text = f"{value:.3g}"
        yield name.replace("_seconds", "").replace("_", " "), text
