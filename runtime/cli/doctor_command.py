"""The command `outrider doctor`: examines a model or a pair on this machine, and prints a report.

Nothing here imports mlx before the arguments are checked.
"""

from __future__ import annotations

from functools import partial

import trio

from runtime.cli.arguments.models import Models
from runtime.selftest.stored_report import rows_of_last_report
from runtime.terminal.display import CommandOutcome, Display, print_sections, warnings_at_the_end
from runtime.terminal.signals import exit_on_signal


def doctor(models: Models) -> CommandOutcome:
    """Examine the models, and print the report on stdout.

    SIGINT and SIGTERM end the process at once.

    Raises:
        OutriderError: a model cannot be loaded or fails.
        OutputError: the report cannot be written.
    """
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        from runtime.doctor.report import examine, report

        models.use_device()
        work = partial(examine, models.target, models.draft, on_progress=display.show_activity, **models.options)
        diagnosis = trio.run(work)
    sections = report(diagnosis)
    if rows := rows_of_last_report():
        sections.append(("self-test", rows))
    print_sections(sections)
    return CommandOutcome(finish_reason="complete")
