"""The command `outrider distill`: trains a drafter for a target. mlx is imported when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import attrs
import trio

from protocol.errors import OutriderError, SettingsError
from runtime.cli.arguments.models import TARGET_HELP, models_of
from runtime.cli.arguments.settings import add_flags, add_options
from runtime.cli.command import Command
from runtime.distill.evaluation import TEMPERATURE, Evaluation
from runtime.distill.options import HOW, WHAT, DistillOptions
from runtime.terminal.display import CommandOutcome, Display, print_message, warnings_at_the_end
from runtime.terminal.signals import SignalScope, exit_on_signal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    # `models_of` reads it. There is no flag, since nothing is drafted: one model computes at a time.
    parser.set_defaults(draft=None)
    what = parser.add_argument_group(WHAT)
    add_flags(
        what,
        ("--target MODEL", f"the model to draft for: {TARGET_HELP}"),
        ("--data FILE", "files of texts to learn from", {"type": Path, "nargs": "+", "required": True}),
        ("--out DIR", "folder for the drafter", {"type": Path, "required": True}),
        ("--init DIR", "folder of an EAGLE-3 drafter to begin with (default: a new one)", {"type": Path}),
    )
    add_options(what, DistillOptions, WHAT)
    how = parser.add_argument_group(HOW)
    add_options(how, DistillOptions, HOW)
    add_flags(how, ("--device DEVICE", 'device of the models: "cpu" or "gpu" (default: MLX\'s)'))


def distill(arguments: argparse.Namespace) -> CommandOutcome:
    """Train until that no longer helps, or a signal comes."""
    models = models_of(arguments)
    names = attrs.fields_dict(DistillOptions).keys() & vars(arguments).keys()
    options = DistillOptions(**{name: vars(arguments)[name] for name in names} | {"target": str(models.target)})
    if (arguments.out / "config.json").exists() and not (arguments.out / "training").exists():
        raise SettingsError(f"--out {arguments.out} has a model that this command did not make; give another folder")
    outcome = CommandOutcome()
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        models.print_default()
        models.use_device()
        from runtime.distill.distillation import distill

        best, failures = list[Evaluation](), list[OutriderError]()

        def show(evaluation: Evaluation) -> None:
            display.clear()
            print_message(_described(evaluation))
            if evaluation.is_best:
                best[:] = [evaluation]

        async def work() -> None:
            try:
                await distill(options, on_progress=display.show_activity, on_evaluation=show)
            except OutriderError as error:
                failures.append(error)
                raise
            outcome.finish_reason = "complete"

        trio.run(SignalScope(outcome, display).run, work)
    for line in [line for evaluation in best for line in _table(evaluation)]:
        print_message(line)
    if outcome.finish_reason is not None:
        print_message(f"the drafter is in {arguments.out}")
    elif outcome.signal is not None:
        # A failure after a signal is one to save.
        print_message(f"stopped: {failures[0]}" if failures else "stopped; the same command goes on from here")
    return outcome


def _described(evaluation: Evaluation) -> str:
    greedy = next(iter(evaluation.acceptance.values())).greedy
    loss = "" if evaluation.loss is None else f" loss {evaluation.loss:.3f},"
    return (
        f"{evaluation.minutes:.1f} min, {evaluation.tokens:,} tokens:{loss} "
        f"acceptance of each draft on held-out text {_rates(greedy)}, {evaluation.accepted:.2f} of {len(greedy)} "
        f"in all{', the best so far' if evaluation.is_best else ''}"
    )


def _table(evaluation: Evaluation) -> list[str]:
    """The acceptance of the drafter that was written, by kind of text."""
    width = max(map(len, evaluation.acceptance))
    return [
        f"{name:{width}} held-out text: {_rates(each.greedy)} accepted of each draft, {_rates(each.sampled)} at "
        f"temperature {TEMPERATURE}"
        for name, each in evaluation.acceptance.items()
    ]


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.3f}" for rate in rates)


COMMAND = Command(
    name="distill",
    usage="--data FILES --out DIR [options]",
    help="train a drafter for a target",
    description="Train a drafter for a target, on this machine and from your text: a decoder layer that reads the "
    "target's hidden states (EAGLE-3). Training ends by itself when it no longer helps. The best drafter so far is "
    "always in DIR; after an interruption, the same command continues the training.",
    epilog="""examples:
  outrider distill --target org/model --data texts.jsonl --out drafter
  outrider distill --target org/model --data src/*.py --continuations 2000 --out drafter
  outrider generate "..." --target org/model --draft drafter

A .jsonl file of --data has a "text" or "messages" in each line, and perhaps a "category", by which acceptance is \
shown; any other file is one text. Ctrl-C stops after the current batch; nothing is lost.""",
    add_arguments=_add_arguments,
    run=distill,
)
