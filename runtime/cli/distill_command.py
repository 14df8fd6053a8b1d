"""The command `outrider distill`: trains a drafter for a target. mlx is imported when it runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import trio

from protocol.errors import SettingsError
from runtime.cli.arguments.models import models_of
from runtime.terminal.display import CommandOutcome, Display, exit_status, print_message, warnings_at_the_end
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from runtime.distill.distillation import Evaluation


def add_distill(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command to the parser's. Returns: the command's parser."""
    parser = commands.add_parser(
        "distill",
        usage="outrider distill --data FILES --out DIR [options]",
        help="train a drafter for a target",
        description="Train a drafter for a target, on this machine and from your text: a decoder layer that reads the "
        "target's hidden states (EAGLE-3). Training ends by itself when it brings no more. The best drafter so far is "
        "always in DIR; the same command goes on where it was stopped.",
        epilog="""examples:
  outrider distill --target org/model --data texts.jsonl --out drafter
  outrider distill --target org/model --data src/*.py --continuations 2000 --out drafter
  outrider generate "..." --target org/model --draft drafter

The files of --data are .jsonl with a "text" or "messages" in each line; any other file is one text. Ctrl-C stops \
after the batch at hand; nothing is lost.""",
    )
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--target", metavar="MODEL", help="path or hub id of the model to draft for (default: the demo target)"
    )
    what.add_argument("--data", metavar="FILE", type=Path, nargs="+", required=True, help="texts to learn from")
    what.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder of the drafter")
    what.add_argument("--init", metavar="DIR", type=Path, help="EAGLE-3 drafter to begin with (default: a new one)")
    what.add_argument(
        "--draft-vocab-size",
        metavar="N",
        type=int,
        help="tokens that the drafter can propose: the most frequent ones of the texts (default: all, at most 32768)",
    )
    what.add_argument(
        "--intermediate-size", metavar="N", type=int, help="width of its feed-forward part (default: the target's)"
    )
    what.add_argument(
        "--dtype", metavar="TYPE", help="of its weights: float32, bfloat16 or float16 (default: bfloat16)"
    )
    how = parser.add_argument_group("how to train")
    how.add_argument("--window", metavar="N", type=int, help="tokens of a window of text (default: 256)")
    how.add_argument(
        "--continuations",
        metavar="N",
        type=int,
        help="windows that the target itself writes, to learn from as well; acceptance is measured on what it writes, "
        "so they help (default: 0)",
    )
    how.add_argument("--batch-tokens", metavar="N", type=int, help="tokens of a batch at most (default: 4096)")
    how.add_argument("--learning-rate", metavar="R", type=float, help="to begin with (default: 0.001)")
    how.add_argument(
        "--max-minutes",
        metavar="N",
        type=float,
        help="stop after so many minutes of learning and evaluating in all; the learning rate falls in the last third "
        "(default: until it brings nothing more)",
    )
    how.add_argument("--seed", metavar="N", type=int, help="of the weights and of the order of texts (default: 0)")
    how.add_argument("--device", metavar="DEVICE", help='"cpu" or "gpu" (default: MLX\'s)')
    return parser


def distill(arguments: argparse.Namespace) -> int:
    """The command `distill`.

    Returns: the exit status.

    Raises: OutriderError: an argument is invalid, or the training failed.
    """
    models = models_of(arguments)
    if (arguments.out / "config.json").exists() and not (arguments.out / "training").exists():
        raise SettingsError(f"--out {arguments.out} has a model that this command did not make; give another folder")
    outcome = CommandOutcome()
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        models.use_device()
        from runtime.distill.distillation import DistillOptions
        from runtime.distill.run import distill

        names = {field.name for field in attrs.fields(DistillOptions)}
        given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
        options = DistillOptions(**given | {"target": str(models.target)})

        def show(evaluation: Evaluation) -> None:
            display.clear()
            print_message(_described(evaluation))

        async def work() -> None:
            await distill(options, on_progress=display.show_activity, on_evaluation=show)
            outcome.finish_reason = "complete"

        trio.run(SignalScope(outcome, display).run, work)
    if outcome.finish_reason is not None:
        print_message(f"the drafter is in {arguments.out}")
    elif outcome.signal is not None:
        print_message("stopped; the same command goes on from here")
    return exit_status(outcome)


def _described(evaluation: Evaluation) -> str:
    rates = " ".join(f"{rate:.3f}" for rate in evaluation.acceptance)
    loss = "" if evaluation.loss is None else f" loss {evaluation.loss:.3f},"
    return (
        f"{evaluation.minutes:.1f} min, {evaluation.tokens:,} tokens:{loss} "
        f"acceptance of each draft on held-out text {rates}, {evaluation.accepted:.2f} of {len(evaluation.acceptance)} "
        f"in all{', the best so far' if evaluation.is_best else ''}"
    )
