"""The command `outrider doctor`: examines a model, a pair or the ranks that a target is sharded over, and reports.

Nothing here imports mlx before the arguments are checked.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from protocol.errors import SettingsError
from protocol.settings import NGRAM
from runtime.cli.arguments.models import NOT_MEASURED, Models, add_models, models_of
from runtime.cli.arguments.settings import add_flags
from runtime.cli.command import Command
from runtime.measuring.machine import machine
from runtime.measuring.report_files import check_report, local_paths, write_report
from runtime.terminal.display import (
    CommandOutcome,
    Display,
    UnfinishedError,
    print_message,
    print_sections,
    print_text,
    warnings_at_the_end,
)
from runtime.terminal.signals import exit_on_signal
from runtime.terminal.tables import Section, Table


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(
        parser,
        without=NOT_MEASURED,
        draft_help='path or hub id of the drafter; "auto" for one on this disk that fits the target, if any',
        target_first=True,
    )
    add_flags(
        parser,
        (
            "--distributed",
            "examine the ranks that mlx.launch has started; if a target is named, also examine it sharded over all of "
            "them",
        ),
        (
            "--check",
            "first check on this device that texts are exact, in a minute or more; the status is 1 if one is not",
        ),
        (
            "--report FILE",
            "also write FILE.json and FILE.md, to paste into an issue; they have nothing private in them",
        ),
    )


def _examines_models(arguments: argparse.Namespace) -> bool:
    names = arguments.target_here, arguments.target, arguments.draft
    return not arguments.distributed or any(name is not None for name in names)


def _check_for_ranks(arguments: argparse.Namespace) -> None:
    if not arguments.distributed:
        raise SettingsError("doctor examines models on one machine, got several ranks; give --distributed")
    for name in ("check", "report"):
        if getattr(arguments, name):
            raise SettingsError(f"--{name} is for one machine; leave it out, or run doctor without mlx.launch")


def doctor(arguments: argparse.Namespace) -> CommandOutcome:
    """Examine the ranks or the models, and print the report on stdout. SIGINT and SIGTERM end the process at once."""
    models, path = models_of(arguments), check_report(arguments.report)
    if arguments.draft is None and models.draft == NGRAM:
        models = attrs.evolve(models, draft=None)  # what a target has by default, without a model to examine
    checks: list[tuple[str, str]] = []
    if arguments.check:
        # Makes float32 really float32, before MLX computes: on CUDA and on Apple's M5 it is TF32 otherwise.
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        from runtime.doctor.ranks import examine_ranks
        from runtime.doctor.report import check_examined, examine, load_of_others, price_tables, report

        models.use_device()
        if _examines_models(arguments):
            models.print_default()
            check_examined(models.target, models.draft, **models.options)
        if (load := load_of_others()) is not None:
            print_message(f"the machine is busy: a load of {load}; times will be too long, and speeds too low")
        if arguments.distributed:
            display.show_activity("examining the ranks")
            found = examine_ranks(models.options.get("group"))
            display.clear()
            # Printed now, since the target may fail to load.
            print_sections([found])
        if not _examines_models(arguments):
            return CommandOutcome(finish_reason="complete")
        if arguments.check:
            from runtime.doctor.checks import run_checks

            for name, faults in run_checks(models.target, models.draft, display.show_activity).items():
                checks.append(("FAILED" if faults else "passed", "; ".join([name, *faults])))
        # `load` is that from before the checks, which are work of our own.
        options = {"is_for_report": path is not None, "on_progress": display.show_activity, **models.options}
        diagnosis = trio.run(partial(examine, models.target, models.draft, load=load, **options))
    sections = report(diagnosis)
    if checks:
        sections.insert(-1, ("checks", checks))
    if path is not None:
        _write_report(path, models, sections, price_tables(diagnosis, str(models.target)))
    if arguments.distributed:
        print_text("\n")
    print_sections(sections)
    outcome = CommandOutcome(finish_reason="complete")
    if num_failed := sum(mark == "FAILED" for mark, _ in checks):
        outcome.failure = UnfinishedError(
            f"{num_failed} of {len(checks)} checks failed; paste --report FILE into an issue"
        )
    return outcome


def _write_report(path: Path, models: Models, sections: list[Section], prices: list[dict[str, Any]]) -> None:
    tables = []
    for table in prices:
        rows = [
            [f"{role}, {length} tokens of text", *(f"{each * 1e3:.2f}" for each in seconds)]
            for role, by_length in table["seconds"].items()
            for length, seconds in by_length.items()
        ]
        title = f"Passes: {table['source']}, {table['device']}"
        tables.append((title, Table(["ms", *map(str, table["widths"])], rows)))
    about, secrets = machine(), local_paths(*models.loaded)
    page = [("this machine", list(about.items())), *sections]
    results = {title: [list(row) for row in rows] for title, rows in sections}
    write_report(path, "doctor", about, results, page, tables, price_tables=prices, secrets=secrets)


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
    "vocabularies match, how long forward passes take, and what speed to expect. With --check, also check that texts "
    "are exact on this device. With --distributed, examine the ranks of a target that is sharded over several "
    "machines.",
    epilog="""examples:
  outrider doctor org/model --draft org/small
  outrider doctor --target org/model --kv-bits 8
  outrider doctor --check --report report
  mlx.launch --hostfile hosts.json -- outrider doctor --distributed
  outrider doctor --blas openblas""",
    common="--target --draft --device --kv-bits --max-kv-size --rewind --check --report --distributed --blas",
    add_arguments=_add_arguments,
    run=doctor,
    follow=_follow,
    check_for_ranks=_check_for_ranks,
)
