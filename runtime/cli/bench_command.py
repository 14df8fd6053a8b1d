"""The command `outrider bench`: its arguments, the measuring, and the output. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.errors import PromptError, SettingsError
from protocol.reprs import shown
from runtime.cli.arguments.models import Models
from runtime.terminal.display import CommandOutcome, Display, print_message, print_text, warnings_at_the_end
from runtime.terminal.output_files import check_place
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from runtime.bench.many_streams import StreamsMeasured, StreamsPlan
    from runtime.bench.one_stream import Measured, Plan
    from runtime.bench.overhead import OverheadMeasured, OverheadPlan
    from runtime.loading.model_sources import Source

    AnyPlan = Plan | StreamsPlan | OverheadPlan
    AnyMeasured = Measured | StreamsMeasured | OverheadMeasured

PLOT_FORMATS = (".svg", ".png", ".pdf")


# --- arguments ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`, other than the models and the BLAS."""
    what = parser.add_argument_group("what to measure")
    prompts = what.add_mutually_exclusive_group()
    prompts.add_argument(
        "-p", "--prompt", metavar="TEXT", action="append", help="text to continue; may be given more than once"
    )
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help="file of texts to continue: a JSON list (FILE.json) or one a line (default: some code)",
    )
    for names, metavar, default, text in (
        (("-m", "--max-tokens"), "N", "96", "tokens to generate for each prompt"),
        (("--repeats",), "N", "3", "number of runs of each contender and prompt"),
        (("-t", "--temperature"), "T", "0", "sampling temperature; 0 is greedy"),
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
        help='proposal lengths for mlx-lm\'s speculative decoding; "none" leaves it out (default: 1,2,3,4,5,6,7,8)',
    )
    what.add_argument(
        "--lookahead",
        metavar="LIST",
        dest="lookaheads",
        default=argparse.SUPPRESS,
        type=_list,
        help="lookaheads of this runtime (default: 0,1,2,3,4,6,8,auto)",
    )
    what.add_argument(
        "--streams",
        metavar="LIST",
        nargs="?",
        const="1,2,4,8,16",
        help="measure these numbers of streams at once, against the same streams one after another and mlx-lm's "
        "BatchGenerator (without LIST: %(const)s); --lookahead then defaults to auto",
    )
    what.add_argument(
        "--overhead",
        action="store_true",
        help="measure what this runtime adds to a token, with a model so small that nothing else counts, against "
        "mlx-lm's generate_step and BatchGenerator; --streams then defaults to 1,4,16,64",
    )
    what.add_argument(
        "--dtype",
        metavar="TYPE",
        type=lambda text: None if text == "none" else text,
        help="cast the models to float32, bfloat16 or float16 (default: none)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    output.add_argument(
        "--plot", metavar="FILE", help=f"also write a plot of the speeds ({', '.join(PLOT_FORMATS)}; needs matplotlib)"
    )


def _number(text: str) -> int | float | str:
    """The number that a text stands for, or the text itself, which the library then rejects."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _list(text: str) -> list[int | float | str]:
    return [] if text == "none" else [_number(part.strip()) for part in text.split(",")]


def _plan(arguments: argparse.Namespace) -> AnyPlan:
    """The plan that the arguments describe.

    Raises: SettingsError, PromptError: something is out of its range, or cannot be read.
    """
    from runtime.bench.many_streams import StreamsPlan
    from runtime.bench.one_stream import Plan
    from runtime.bench.overhead import OverheadPlan

    kind: type[AnyPlan] = OverheadPlan if arguments.overhead else Plan if arguments.streams is None else StreamsPlan
    names = {field.name for field in attrs.fields(kind)}
    given = {name: value for name, value in vars(arguments).items() if name in names and name != "prompts"}
    if arguments.overhead:
        _check_for_overhead(arguments)
    elif arguments.prompt is not None:
        given["prompts"] = arguments.prompt
    elif arguments.prompts is not None:
        given["prompts"] = read_prompts(Path(arguments.prompts))
    if arguments.streams is not None:
        given["streams"] = _list(arguments.streams)
        if not arguments.overhead and "num_draft_tokens" in vars(arguments):
            raise SettingsError(
                "--num-draft-tokens does not go with --streams: mlx-lm's BatchGenerator cannot speculate; leave it out"
            )
    return kind(**given)


def _check_for_overhead(arguments: argparse.Namespace) -> None:
    for name in ("prompt", "prompts", "temperature", "num_draft_tokens", "lookaheads", "dtype", "plot"):
        if getattr(arguments, name, None) is not None:
            flag = "lookahead" if name == "lookaheads" else name.replace("_", "-")
            raise SettingsError(f"--{flag} does not go with --overhead, which decodes its own prompts; leave it out")


def read_prompts(path: Path) -> list[str]:
    """The prompts in a file.

    Raises: PromptError: the file cannot be read, or has no prompt.
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
    """The path of the plot, checked before anything is measured.

    Raises: SettingsError: a plot cannot be written there.
    """
    if file is None:
        return None
    path = Path(file)
    if path.suffix not in PLOT_FORMATS:
        raise SettingsError(f"plot must be a file that ends in {', '.join(PLOT_FORMATS)}, got {shown(file)}")
    check_place("plot", path)
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError('plot needs matplotlib, which is not installed; pip install "outrider[plot]"')
    return path


def check_for_ranks(arguments: argparse.Namespace) -> None:
    """Check what does not go with a target that is sharded over ranks.

    Raises: SettingsError: an argument does not.
    """
    for name, why in (
        ("streams", "compares with mlx-lm's BatchGenerator, which would have to run on all ranks at once"),
        ("num_draft_tokens", "is for mlx-lm's speculative decoding, which does not run on ranks"),
        ("dtype", "would cast rank 0's part of the target alone"),
    ):
        if getattr(arguments, name, None) is not None:
            raise SettingsError.of(
                "{option} {why}; leave it out, or run bench without mlx.launch", option=name, why=why
            )


# --- the command ----------------------------------------------------------------------------------


def bench(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Measure, and show the figures, also those of an interrupted benchmark.

    Raises: OutriderError: an argument is invalid. Later errors are in the outcome.
    """
    if models.draft is None:
        raise SettingsError("bench compares ways to speculate and needs a draft model; give --draft")
    plot = _check_plot(arguments.plot)
    plan = _plan(arguments)
    if models.more_drafts and arguments.streams is not None and not arguments.overhead:
        raise SettingsError(
            f"--streams measures one drafter, got {len(models.drafts)}; give --draft once, or leave --streams out"
        )
    measured, measuring = _measuring(plan, models, models.draft)
    models.use_device()
    outcome = CommandOutcome()

    async def work() -> None:
        try:
            await measuring(display.show_activity)
        finally:
            if measured.result().is_complete:
                outcome.finish_reason = "length"

    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        trio.run(SignalScope(outcome, display).run, work)
    _show(measured, outcome, arguments.json, plot)
    return outcome


def _measuring(
    plan: AnyPlan, models: Models, draft: Source
) -> tuple[AnyMeasured, Callable[[Callable[[str], None]], Awaitable[object]]]:
    """The collector of the figures, and the function that measures into it and reports its progress."""
    from runtime.bench import many_streams, one_stream, overhead

    if isinstance(plan, overhead.OverheadPlan):
        runtimes_own = overhead.OverheadMeasured(plan)
        return runtimes_own, lambda on_progress: overhead.measure_overhead(runtimes_own, on_progress=on_progress)
    if isinstance(plan, many_streams.StreamsPlan):
        streams = many_streams.StreamsMeasured(plan)
        return streams, lambda on_progress: many_streams.measure_streams(
            models.target, draft, measured=streams, on_progress=on_progress
        )
    measured = one_stream.Measured(plan)
    return measured, lambda on_progress: one_stream.measure(
        models.target,
        [draft, *models.more_drafts],
        measured=measured,
        group=models.options.get("group"),
        on_progress=on_progress,
    )


def _show(measured: AnyMeasured, outcome: CommandOutcome, as_json: bool, plot: Path | None) -> None:
    from runtime.bench import plot as bench_plot
    from runtime.bench.many_streams import StreamsBenchmark as OfStreams
    from runtime.bench.overhead import Overhead
    from runtime.bench.tables import print_many_streams, print_one_stream, print_overhead

    result = measured.result()
    if as_json:
        if outcome.failure is None or result.repeats_done:
            print_text(json.dumps(attrs.asdict(result)) + "\n")
    elif result.repeats_done:
        if isinstance(result, Overhead):
            print_overhead(result)
        elif isinstance(result, OfStreams):
            print_many_streams(result)
        else:
            print_one_stream(result)
    if not result.repeats_done:
        if outcome.signal is not None:
            print_message("nothing was measured yet")
    elif plot is not None and not isinstance(result, Overhead):
        bench_plot.draw_streams(result, plot) if isinstance(result, OfStreams) else bench_plot.draw(result, plot)
