"""The command `outrider doctor`: examines a model, a pair or the ranks that a target is sharded over, and reports.

Nothing here imports mlx before the arguments are checked.
"""

from __future__ import annotations

import argparse
from functools import partial

import trio

from protocol.errors import SettingsError
from runtime.cli.arguments.models import DRAFTER_ELSEWHERE, PREFIX_CACHE, Models, add_models, models_of
from runtime.cli.command import Command
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    print_message,
    print_sections,
    print_text,
    warnings_at_the_end,
)
from runtime.terminal.signals import exit_on_signal


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(
        parser,
        without=(*PREFIX_CACHE, "chat_template_args", *DRAFTER_ELSEWHERE),
        draft_help='path or hub id of the drafter; "auto" for one on this disk that fits the target, if any',
        target_first=True,
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="examine the ranks that mlx.launch has started; if a target is named, also examine it sharded over "
        "all of them",
    )


def _examines_models(arguments: argparse.Namespace) -> bool:
    names = arguments.target_here, arguments.target, arguments.draft
    return not arguments.distributed or any(name is not None for name in names)


def _check_for_ranks(arguments: argparse.Namespace) -> None:
    if not arguments.distributed:
        raise SettingsError("doctor examines models on one machine, got several ranks; give --distributed")


def doctor(arguments: argparse.Namespace) -> CommandOutcome:
    """Examine the ranks or the models, and print the report on stdout. SIGINT and SIGTERM end the process at once."""
    models = models_of(arguments)
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        from runtime.doctor.ranks import examine_ranks, report_on_ranks
        from runtime.doctor.report import check_examined, examine, load_of_others, report

        models.use_device()
        if _examines_models(arguments):
            models.print_default()
            check_examined(models.target, models.draft, **models.options)
        if (load := load_of_others()) is not None:
            print_message(f"the machine is busy: a load of {load}; times will be too long, and speeds too low")
        if arguments.distributed:
            display.show_activity("examining the ranks")
            found = report_on_ranks(examine_ranks(models.options.get("group")))
            display.clear()
            # Printed now, since the target may fail to load.
            print_sections(found)
        if not _examines_models(arguments):
            return CommandOutcome(finish_reason="complete")
        work = partial(examine, models.target, models.draft, on_progress=display.show_activity, **models.options)
        diagnosis = trio.run(work)
    sections = report(diagnosis)
    if arguments.distributed:
        print_text("\n")
    print_sections(sections)
    return CommandOutcome(finish_reason="complete")


def _follow(arguments: argparse.Namespace, models: Models) -> None:
    from runtime.doctor.ranks import take_part_in_examination

    take_part_in_examination(models.options["group"])
    if _examines_models(arguments):
        from runtime.ranks.following import follow

        follow(models.target, models.options["group"])


COMMAND = Command(
    name="doctor",
    usage="[MODEL] [options]",
    help="examine a model or a pair on this machine",
    description="Examine a model or a pair on this machine: its caches and how they rewind, whether the "
    "vocabularies match, how long forward passes take, and what speed to expect. With --distributed, examine the "
    "ranks of a target that is sharded over several machines.",
    epilog="""examples:
  outrider doctor org/model --draft org/small
  outrider doctor --target org/model --kv-bits 8
  mlx.launch --hostfile hosts.json -- outrider doctor --distributed
  outrider doctor --blas openblas""",
    common="--target --draft --device --kv-bits --max-kv-size --rewind --distributed --blas",
    add_arguments=_add_arguments,
    run=doctor,
    follow=_follow,
    check_for_ranks=_check_for_ranks,
)
