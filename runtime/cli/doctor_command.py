"""The command `outrider doctor`: examines a model, a pair or the ranks that a target is sharded over, and reports.

Nothing here imports mlx before the arguments are checked.
"""

from __future__ import annotations

import argparse
from functools import partial

import trio

from runtime.cli.arguments.models import Models
from runtime.selftest.stored_report import rows_of_last_report
from runtime.terminal.display import CommandOutcome, Display, print_sections, print_text, warnings_at_the_end
from runtime.terminal.signals import exit_on_signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`, other than the models and the BLAS."""
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="examine the ranks that mlx.launch has started, and the links between them; also a target over all of "
        "them, if one is named",
    )


def examines_models(arguments: argparse.Namespace) -> bool:
    """Whether models are to be examined: not where the ranks are, and no model is named."""
    names = arguments.target_here, arguments.target, arguments.draft
    return not arguments.distributed or any(name is not None for name in names)


def doctor(arguments: argparse.Namespace, models: Models) -> CommandOutcome:
    """Examine the ranks or the models, and print the report on stdout.

    SIGINT and SIGTERM end the process at once.

    Raises:
        OutriderError: a model cannot be loaded or fails, or a rank ends, hangs or fails.
        OutputError: the report cannot be written.
    """
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        from runtime.doctor.ranks import examine_ranks, plan, report_on_ranks
        from runtime.doctor.report import check_examined, examine, report

        models.use_device()
        ranks = None
        if examines_models(arguments):
            check_examined(models.target, models.draft, **models.options)
        if arguments.distributed:
            display.show_activity("measuring the links between the ranks")
            ranks = examine_ranks(models.options.get("group"))
            display.clear()
            # Now, since a target may fail to load.
            print_sections(report_on_ranks(ranks))
        if not examines_models(arguments):
            return CommandOutcome(finish_reason="complete")
        work = partial(examine, models.target, models.draft, on_progress=display.show_activity, **models.options)
        diagnosis = trio.run(work)
    sections = report(diagnosis)
    if ranks is not None:
        print_text("\n")
        if (command := plan(ranks, diagnosis)) is not None:
            sections[-1][1].insert(-1, ("plan", command))
    if rows := rows_of_last_report():
        sections.insert(-1, ("self-test", rows))
    print_sections(sections)
    return CommandOutcome(finish_reason="complete")


def take_part(arguments: argparse.Namespace, models: Models) -> None:
    """Take part in the examination as another rank than 0.

    Raises: OutriderError: see `runtime.follow`.
    """
    from runtime.doctor.ranks import take_part_in_examination

    take_part_in_examination(models.options["group"])
    if examines_models(arguments):
        from runtime.ranks.following import follow

        follow(models.target, models.options["group"])
