"""The command `outrider bench`: its arguments, the measuring, and the output. Nothing here imports mlx at its top."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from protocol.errors import SettingsError
from protocol.open_options import OpenOptions
from protocol.validation import check_number, must_be
from runtime.cli.arguments.models import NOT_MEASURED, Models, add_models, models_of
from runtime.cli.arguments.settings import Value, add_flags, parse_value
from runtime.cli.command import Command, follow_target
from runtime.cli.flags import flag
from runtime.loading.model_spec import ModelSpec
from runtime.measuring.report_files import check_report, local_paths, write_report
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    check_place,
    print_message,
    print_text,
    printing,
    warnings_at_the_end,
)
from runtime.terminal.signals import SignalScope, exit_on_signal
from runtime.terminal.tables import show_sections, show_table

if TYPE_CHECKING:
    from runtime.bench.benchmark import Benchmark
    from runtime.bench.figures import Report
    from runtime.loading.model_sources import ModelSource

# The acceptance rate of a good draft model on code.
ACCEPTANCE = 0.75

# Plain decoding against "auto" on the bundled prompts.
_FOR_BUNDLED = {"max_tokens": 128, "repeats": 1, "num_draft_tokens": (), "lookaheads": ("auto",)}


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(
        parser,
        without=(*NOT_MEASURED, "max_kv_size"),
        draft_help='path or hub id of a drafter; "auto" for one on this disk that fits the target; "ngram" for '
        "prompt lookup; may be given more than once",
        several_drafts=True,
    )
    what = parser.add_argument_group("what to measure")
    prompts = what.add_mutually_exclusive_group()
    prompts.add_argument(
        "-p", "--prompt", metavar="TEXT", action="append", help="text to continue; may be given more than once"
    )
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        nargs="?",
        const="bundled",
        help="file of prompts: a JSON list of texts (FILE.json), or one prompt per line: a text, or an object with "
        "prompt, messages or turns, and category, as in Spec-Bench and SPEED-Bench; without FILE 40 prompts for chat "
        "models (chat, code, rewriting, summaries and JSON), with the defaults --max-tokens 128 --repeats 1 "
        "--lookahead auto --num-draft-tokens none (default: some code)",
    )
    value: dict[str, Any] = {"type": parse_value, "default": argparse.SUPPRESS}
    add_flags(
        what,
        ("-m --max-tokens N", "tokens to generate for each prompt (default: 96)", value),
        ("--repeats N", "number of runs for each prompt and way of decoding (default: 3)", value),
        ("-t --temperature T", "sampling temperature; 0 is greedy (default: 0)", value),
        (
            "--num-draft-tokens LIST",
            'proposal lengths for mlx-lm\'s speculative decoding; "none" leaves it out (default: 1,2,3,4,5,6,7,8)',
            value | {"type": _list},
        ),
        (
            "--lookahead LIST",
            "lookaheads to measure with this runtime (default: 0,1,2,3,4,6,8,auto)",
            value | {"type": _list, "dest": "lookaheads"},
        ),
        (
            "--streams LIST",
            "measure these numbers of concurrent streams, against the same streams one after another and mlx-lm's "
            "BatchGenerator (without LIST: %(const)s); --lookahead then defaults to auto",
            {"nargs": "?", "const": "1,2,4,8,16"},
        ),
        (
            "--shape SHAPE",
            "measure a pair with random weights, which costs as much time as a real one and needs no download: 8b, "
            "30b-a3b, hybrid or sliding (4B each); can be combined with --quantize and --draft-quantize",
        ),
        (
            "--draft-shape {0.5b,layer}",
            "with --shape: the drafter, like a 0.5B model or like one trained layer of the target (default: 0.5b)",
        ),
        (
            "--acceptance P",
            f"with --shape: probability that the drafter's guess is right, in [0, 1] (default: {ACCEPTANCE:g})",
            {"type": parse_value},
        ),
        (
            "--overhead",
            "measure the time that this runtime adds to each token, with a model so small that nothing else matters, "
            "against mlx-lm's generate_step and BatchGenerator; --streams then defaults to 1,4,16,64",
        ),
        (
            "--trace-acceptance FILE",
            "measure no speed, but write what the drafter would propose at each position of the greedy answers, how "
            "sure it is, and what a prompt's response_format forces, as JSON lines, and show how often the drafter is "
            "right by kind of text",
        ),
        (
            "--dtype TYPE",
            "cast the models to float32, bfloat16 or float16 (default: none)",
            {"type": lambda text: None if text == "none" else text},
        ),
    )
    add_flags(
        parser.add_argument_group("output"),
        ("--json", "print one JSON object instead of tables"),
        ("--report FILE", "also write FILE.json and FILE.md, to attach to an issue; they have nothing private in them"),
    )


def _list(text: str) -> list[Value]:
    return [] if text == "none" else [parse_value(part.strip()) for part in text.split(",")]


# Ways of measuring that some arguments do not go with, and why.
_ALONE = {
    "overhead": ("prompt prompts temperature num_draft_tokens lookaheads dtype", "which decodes its own prompts"),
    "shape": ("target draft prompt prompts overhead", "which has models and texts of its own"),
    "streams": ("num_draft_tokens", "since mlx-lm's BatchGenerator cannot speculate"),
    "trace_acceptance": ("streams overhead shape num_draft_tokens lookaheads", "which measures no speed"),
}


def _check_combinations(arguments: argparse.Namespace, models: Models) -> None:
    given = {name for name, value in vars(arguments).items() if value not in (None, False)}
    if models.draft is None:
        raise SettingsError("bench compares ways to speculate and needs a draft model; give --draft")
    for way in ("streams", "trace_acceptance"):
        if way in given and models.more_drafts and not arguments.overhead:
            raise SettingsError(f"{flag(way)} measures one drafter, got {len(models.drafts)}; give --draft once")
    for way, (others, why) in _ALONE.items():
        for name in others.split():
            if {way, name} <= given:
                raise SettingsError(f"{flag(name)} does not go with {flag(way)}, {why}; leave it out")
    for name in ("acceptance", "draft_shape"):
        if name in given and arguments.shape is None:
            raise SettingsError(f"{flag(name)} is of the drafter that --shape makes; add --shape, or leave it out")


def _benchmark(arguments: argparse.Namespace, options: Mapping[str, Any]) -> Benchmark:
    """The benchmark that the arguments and options of `open` describe."""
    from runtime.bench.acceptance_trace import AcceptanceTrace
    from runtime.bench.many_streams import ManyStreams
    from runtime.bench.one_stream import OneStream
    from runtime.bench.overhead import Overhead
    from runtime.bench.prompt_files import BUNDLED, read_prompts
    from runtime.bench.shapes import PROMPTS
    from runtime.loading.model_sources import caches_of

    given = {**vars(arguments), "cache_options": caches_of(OpenOptions(**options))}
    streams, prompts = given.pop("streams"), given.pop("prompts")
    if streams is not None:
        given["streams"] = _list(streams)
    if arguments.overhead:
        return Overhead(**{name: given[name] for name in ("max_tokens", "repeats", "streams") if name in given})
    if arguments.prompt is not None:
        given["prompts"] = arguments.prompt
    elif prompts is not None:
        given["prompts"] = read_prompts(prompts)
        if prompts == BUNDLED and streams is None:
            given = _FOR_BUNDLED | given
    if arguments.shape is not None:
        given |= {"prompts": PROMPTS[:3] if streams is None else PROMPTS, "dtype": None}
    kind: type[Benchmark] = OneStream if streams is None else ManyStreams
    if arguments.trace_acceptance is not None:
        kind = AcceptanceTrace
        given["file"] = check_place("--trace-acceptance", Path(arguments.trace_acceptance).expanduser())
    names = [field.name for field in attrs.fields(kind) if field.init]
    return kind(**{name: given[name] for name in names if name in given})


def _shaped(arguments: argparse.Namespace, models: Models) -> Callable[[], tuple[ModelSource, ModelSource]]:
    from runtime.bench.benchmark import DTYPES
    from runtime.bench.shapes import DRAFTERS, SHAPES, shaped_pair

    if arguments.shape not in SHAPES:
        raise must_be("--shape", f"one of {', '.join(SHAPES)}", arguments.shape)
    if (drafter := arguments.draft_shape or DRAFTERS[0]) not in DRAFTERS:
        raise must_be("--draft-shape", f"one of {', '.join(DRAFTERS)}", drafter)
    specs = [model if isinstance(model, ModelSpec) else None for model in (models.target, models.draft)]
    if not all(spec is None or attrs.evolve(spec, quantize=None).is_plain for spec in specs):
        raise SettingsError("of the flags that load models, --shape takes --quantize and --draft-quantize only")
    quantizations = [None if spec is None else spec.quantization for spec in specs]
    acceptance = ACCEPTANCE if arguments.acceptance is None else arguments.acceptance
    check_number("--acceptance", acceptance, 0, 1)
    if (dtype := getattr(arguments, "dtype", None) or "bfloat16") not in DTYPES:
        raise must_be("--dtype", f"one of {', '.join(DTYPES)}", dtype)

    def pair() -> tuple[ModelSource, ModelSource]:
        target, draft = shaped_pair(arguments.shape, acceptance, dtype, *quantizations, drafter=drafter)
        return (target, None), (draft, None)

    return pair


def _check_for_ranks(arguments: argparse.Namespace) -> None:
    for name, why in (
        ("streams", "compares with mlx-lm's BatchGenerator, which would have to run on all ranks at once"),
        ("num_draft_tokens", "is for mlx-lm's speculative decoding, which does not run on ranks"),
        ("dtype", "would cast rank 0's part of the target alone"),
        ("trace_acceptance", "is made on one machine"),
    ):
        if getattr(arguments, name, None) is not None:
            raise SettingsError(f"{flag(name)} {why}; leave it out, or run bench without mlx.launch")


def bench(arguments: argparse.Namespace) -> CommandOutcome:
    """Measure, and show the figures, also those of an interrupted benchmark."""
    models = models_of(arguments)
    written = check_report(arguments.report)
    _check_combinations(arguments, models)
    target, draft = models.target, models.draft
    pair = (lambda: (target, draft)) if arguments.shape is None else _shaped(arguments, models)
    group = models.options.pop("group", None)
    benchmark = _benchmark(arguments, models.options)
    if not arguments.overhead and arguments.shape is None:
        models.print_default()
    models.use_device()
    outcome = CommandOutcome()

    async def work() -> None:
        try:
            display.show_activity("drawing the weights" if arguments.shape else "loading the models")
            await benchmark.measure(*pair(), *models.more_drafts, group=group, on_progress=display.show_activity)
        finally:
            if benchmark.is_complete:
                outcome.finish_reason = "length"

    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        trio.run(SignalScope(outcome, display).run, work)
    result = benchmark.result()
    if not benchmark.repeats_done:
        if outcome.signal is not None:
            print_message("nothing was measured yet")
        elif arguments.json and outcome.failure is None:
            print_text(json.dumps(result) + "\n")
        return outcome
    report = benchmark.report(result)
    if written is not None:
        sections = [*report.sections, ("Notes", [("", note) for note in report.notes])]
        facts = {name: value for name, value in result.items() if name != "machine"}
        secrets = local_paths(*models.loaded, *benchmark.draft_names)
        write_report(written, "bench", result["machine"], facts, sections, report.tables, secrets=secrets)
    if arguments.json:
        print_text(json.dumps(result) + "\n")
    else:
        _print(report)
    return outcome


def _print(report: Report) -> None:
    with printing() as console:
        show_sections(console, report.sections)
        for title, table in report.tables:
            console.print(f"\n{title}" if len(report.tables) > 1 else "", style="bold")
            show_table(console, table)
        for note in report.notes:
            console.print(f"\n{note}", markup=False)


COMMAND = Command(
    name="bench",
    usage="[options]",
    help="measure the speed-up of speculation on this machine",
    description="Measure the speed-up of speculation on this machine: mlx-lm's plain and speculative decoding and "
    "this runtime's decode the same prompts in turn. By default these are 16,000 tokens, five minutes at 50 a second, "
    "in which nothing else should run; fewer with a shorter --lookahead or --max-tokens.",
    epilog="""examples:
  outrider bench --target org/model --draft org/small
  outrider bench --target org/model --draft ngram --prompt "Once more" -m 200
  outrider bench --target org/model --draft org/small --draft ngram
  outrider bench --target org/model --draft ngram --prompts
  outrider bench --streams 1,4 --json

Ctrl-C stops the benchmark and shows the figures so far.""",
    common="--target --draft --shape --prompt --prompts --max-tokens --lookahead --streams --json --report",
    add_arguments=_add_arguments,
    run=bench,
    follow=follow_target,
    check_for_ranks=_check_for_ranks,
)
