"""The command `outrider bench`: its arguments, the measuring, and the output. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import SettingsError
from protocol.validation import check_number, must_be
from runtime.cli.arguments.models import Models
from runtime.loading.model_spec import ModelSpec
from runtime.measuring.report_files import DeviceReport, check_report, local_paths
from runtime.measuring.reports import check_plot, save_plot
from runtime.terminal.display import CommandOutcome, Display, print_message, print_text, warnings_at_the_end
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from runtime.bench.benchmark import Benchmark
    from runtime.loading.model_sources import Source

PLOT_FORMATS = (".svg", ".png", ".pdf")
# Of a good draft model on code.
ACCEPTANCE = 0.75


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
        help="file of prompts: a JSON list of texts (FILE.json), or a line each: a text, or an object with prompt, "
        'messages or turns, and category, as in Spec-Bench and SPEED-Bench; "bundled" for 40 edits, quotes and free '
        "texts (default: some code)",
    )
    for names, metavar, default, text in (
        (("-m", "--max-tokens"), "N", "96", "tokens to generate for each prompt"),
        (("--repeats",), "N", "3", "number of runs of each contender and prompt"),
        (("--cooldown",), "SECONDS", "0", "rest before each run: a hot machine may be slower, without a warning"),
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
        "--shape",
        metavar="SHAPE",
        help="measure a pair with the cost of a real one and no download: random weights in the shape of 8b, 30b-a3b, "
        "hybrid or sliding (a 4B each), with a drafter like a 0.5B; --quantize and --draft-quantize go with it",
    )
    what.add_argument(
        "--acceptance",
        metavar="P",
        type=_number,
        help=f"with --shape: how often a guess of the drafter is right (default: {ACCEPTANCE:g})",
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
        "--report",
        metavar="FILE",
        help="also write FILE.json and FILE.md, for an issue, with nothing private in them",
    )
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


def _benchmark(arguments: argparse.Namespace, models: Models) -> tuple[Benchmark[Any], Callable[..., Awaitable[Any]]]:
    """The benchmark that the arguments describe, and the function that measures a pair and reports its progress.

    Raises: SettingsError, PromptError: something is out of its range, or cannot be read.
    """
    from runtime.bench.many_streams import ManyStreams, StreamsPlan
    from runtime.bench.one_stream import OneStream, OneStreamPlan
    from runtime.bench.overhead import Overhead, OverheadPlan
    from runtime.bench.prompt_files import read_prompts
    from runtime.bench.shapes import PROMPTS

    streams: dict[str, Any] = {} if arguments.streams is None else {"streams": _list(arguments.streams)}
    if arguments.overhead:
        _check_for_overhead(arguments)
        overhead = Overhead(OverheadPlan(**_given(arguments, {"max_tokens", "repeats"}), **streams))
        return overhead, lambda *_, **options: overhead.measure(**options)
    kind = StreamsPlan if streams else OneStreamPlan
    given = _given(arguments, {field.name for field in attrs.fields(kind)} - {"prompts", "streams"}) | streams
    if arguments.prompt is not None:
        given["prompts"] = arguments.prompt
    elif arguments.prompts is not None:
        given["prompts"] = read_prompts(arguments.prompts)
    if arguments.shape is not None:
        given = {"prompts": PROMPTS if streams else PROMPTS[:3]} | given | {"dtype": None}
    if not streams:
        one = OneStream(OneStreamPlan(**given))
        group = models.options.get("group")
        return one, lambda target, draft, **options: one.measure(
            target, [draft, *models.more_drafts], group=group, **options
        )
    if "num_draft_tokens" in vars(arguments):
        raise SettingsError(
            "--num-draft-tokens does not go with --streams: mlx-lm's BatchGenerator cannot speculate; leave it out"
        )
    many = ManyStreams(StreamsPlan(**given))
    return many, many.measure


def _given(arguments: argparse.Namespace, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name in names}


def _shaped(arguments: argparse.Namespace, models: Models) -> Callable[[], tuple[Source, Source]]:
    """What makes the pair of `--shape`.

    Raises: SettingsError: there is no such shape, or something does not go with it.
    """
    from runtime.bench.benchmark import DTYPES
    from runtime.bench.shapes import SHAPES, shaped_pair

    if arguments.shape not in SHAPES:
        raise must_be("--shape", f"one of {', '.join(SHAPES)}", arguments.shape)
    for name in ("target", "draft", "prompt", "prompts", "overhead"):
        if getattr(arguments, name):
            raise SettingsError(
                f"--{name} does not go with --shape, which has models and texts of its own; leave it out"
            )
    quantizations = []
    for model in (models.target, models.draft):
        spec = model if isinstance(model, ModelSpec) else None
        if spec is not None and not attrs.evolve(spec, quantize=None).is_plain:
            raise SettingsError("of the flags that load models, --shape takes --quantize and --draft-quantize only")
        quantizations.append(None if spec is None else spec.quantization)
    acceptance = ACCEPTANCE if arguments.acceptance is None else arguments.acceptance
    check_number("--acceptance", acceptance, 0, 1)
    if (dtype := getattr(arguments, "dtype", None) or "bfloat16") not in DTYPES:
        raise must_be("--dtype", f"one of {', '.join(DTYPES)}", dtype)

    def pair() -> tuple[Source, Source]:
        target, draft = shaped_pair(arguments.shape, acceptance, dtype, *quantizations)
        return (target, None), (draft, None)

    return pair


def _check_for_overhead(arguments: argparse.Namespace) -> None:
    for name in ("prompt", "prompts", "temperature", "num_draft_tokens", "lookaheads", "dtype", "plot"):
        if getattr(arguments, name, None) is not None:
            flag = "lookahead" if name == "lookaheads" else name.replace("_", "-")
            raise SettingsError(f"--{flag} does not go with --overhead, which decodes its own prompts; leave it out")


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
    plot = check_plot(arguments.plot, PLOT_FORMATS)
    written = check_report(arguments.report)
    if models.more_drafts and arguments.streams is not None and not arguments.overhead:
        raise SettingsError(
            f"--streams measures one drafter, got {len(models.drafts)}; give --draft once, or leave --streams out"
        )
    if arguments.acceptance is not None and arguments.shape is None:
        raise SettingsError("--acceptance is of the drafter that --shape makes; add --shape, or leave it out")
    draft = models.draft
    pair = (lambda: (models.target, draft)) if arguments.shape is None else _shaped(arguments, models)
    benchmark, measure = _benchmark(arguments, models)
    models.use_device()
    outcome = CommandOutcome()

    async def work() -> None:
        try:
            display.show_activity("drawing the weights" if arguments.shape else "loading the models")
            await measure(*pair(), on_progress=display.show_activity)
        finally:
            if benchmark.contest.is_complete:
                outcome.finish_reason = "length"

    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        trio.run(SignalScope(outcome, display).run, work)
    result = benchmark.result()
    if written is not None and result.repeats_done:
        report = benchmark.report(result)
        sections = [*report.about, *report.details, ("Notes", [("", note) for note in report.notes])]
        facts, tables = result.as_json(), [("Figures", report.table)]
        device_report = DeviceReport("bench", facts.pop("machine"), facts)
        device_report.write(
            written, "outrider bench", sections, tables, local_paths(*models.loaded, *benchmark.about.drafts)
        )
    if arguments.json:
        if outcome.failure is None or result.repeats_done:
            print_text(json.dumps(result.as_json()) + "\n")
    elif result.repeats_done:
        benchmark.report(result).print()
    if not result.repeats_done:
        if outcome.signal is not None:
            print_message("nothing was measured yet")
    elif plot is not None:
        save_plot(benchmark.plot(result), plot, error_type=SettingsError)
    return outcome
