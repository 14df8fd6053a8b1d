"""The command `outrider selftest`: checks Outrider's guarantees on this device, and finds the settings that suit it.

Nothing here imports mlx; the checks do, each in a process of its own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from protocol.errors import ModelError, OutriderError, SettingsError
from protocol.settings import AUTO_DRAFT, NGRAM
from protocol.validation import check_number
from runtime.cli.arguments.models import OPTIONS, add_models, models_of
from runtime.cli.arguments.settings import add_flags
from runtime.cli.command import Command
from runtime.loading.blas import check_environment
from runtime.loading.demo import DEMO_DRAFT, DEMO_TARGET
from runtime.loading.named_models import DEMO
from runtime.measuring.report_files import check_report, local_paths
from runtime.terminal.display import CommandOutcome, Display, print_message, print_sections, warnings_at_the_end
from runtime.terminal.signals import SignalScope, exit_on_signal

if TYPE_CHECKING:
    from runtime.selftest.checks import Check
    from runtime.selftest.report import SelfTestReport

# Seconds for each of the two open-ended checks, for each minute that the user gives.
SECONDS_A_MINUTE = 30.0
# The same with --quick.
QUICK_S = 5.0
# Time limits for all checks together.
LIMIT_S, QUICK_LIMIT_S = 900.0, 180.0
# Shape of the pair with random weights that is also measured on a GPU.
SHAPE = "8b"


class CheckError(OutriderError):
    """A check has failed, or most were skipped."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_models(parser, without=OPTIONS, draft_help="path or hub id of a draft model", as_they_are=True)
    add_flags(
        parser,
        (
            "--minutes N",
            "approximate minutes for the checks that can run for any length of time (default: 1)",
            {"type": float, "default": 1.0},
        ),
        ("--quick", "only the checks that matter most and the speeds, in about three minutes"),
        (
            "--cooldown SECONDS",
            "rest before each timed run, since a hot machine may slow down without a warning (default: 0)",
            {"type": float, "default": 0.0},
        ),
        ("--report FILE", "write FILE.json and FILE.md, to attach to an issue"),
    )


def selftest(arguments: argparse.Namespace) -> CommandOutcome:
    """Run the checks and print a report. The outcome fails if a check does, or if most were skipped."""
    from runtime.selftest.report import SelfTestReport, summary

    check_number("--minutes", arguments.minutes, above=0)
    check_number("--cooldown", arguments.cooldown, 0)
    check_environment()
    path = check_report(arguments.report)
    if arguments.target is None:
        arguments.target = DEMO  # two models, which take minutes less than a larger one
    models = models_of(arguments)
    if models.draft in (None, NGRAM, AUTO_DRAFT):
        raise SettingsError("selftest checks two models at a time and needs a draft model; name one with --draft")
    target, draft = str(models.target), str(models.draft)
    subject = {
        "target": target,
        "draft": draft,
        "seconds": QUICK_S if arguments.quick else SECONDS_A_MINUTE * arguments.minutes,
        "is_quick": arguments.quick,
        "cooldown": arguments.cooldown,
        "device": models.device,
    }
    with_own_models = (target, draft) != (str(DEMO_TARGET), str(DEMO_DRAFT))
    report, outcome = SelfTestReport(with_own_models, local_paths(target, draft)), CommandOutcome()
    with warnings_at_the_end(), Display() as display, exit_on_signal(display):
        trio.run(SignalScope(outcome, display).run, partial(_run, subject, report, display.show_activity))
    if outcome.failure is not None:
        return outcome
    is_whole = outcome.signal is None
    if is_whole and path is not None:
        # Before printing, so that nothing is lost if stdout is closed. An interrupted run leaves no report.
        report.write(path)
    if report.runs:
        print_sections(report.sections())
        print_message(summary(report.runs) if is_whole else f"interrupted after {len(report.runs)} checks")
    if report.failures and is_whole:
        outcome.failure = CheckError(f"these checks failed: {', '.join(run.check.label for run in report.failures)}")
    elif report.is_hollow and is_whole:
        outcome.failure = CheckError("most checks were skipped; try again when nothing else runs here")
    return outcome


async def _run(subject: dict[str, Any], report: SelfTestReport, on_progress: Callable[[str], None]) -> None:
    from runtime.selftest.checks import CHECKS, CHECKS_OF_BUFFERS, CHECKS_OF_LAYERS, OF_THE_BUNDLED_PAIR, QUICK
    from runtime.selftest.runner import run_checks

    is_quick = subject["is_quick"]
    deadline = trio.current_time() + (QUICK_LIMIT_S if is_quick else LIMIT_S)

    async def run(checks: Sequence[Check], **changes: Any) -> None:
        await run_checks(checks, subject | changes, on_progress, report.runs.append, deadline)

    await run(CHECKS[:1])
    (loading,) = report.runs
    if (device := loading.finding.figures.get("device")) is None:
        why = loading.finding.figures.get("error", loading.finding.summary)
        raise ModelError(f"the models cannot be loaded, so nothing was checked: {why}")
    quick = sorted((check for check in CHECKS[1:] if check.name in QUICK), key=lambda check: QUICK.index(check.name))
    await run(quick if is_quick else CHECKS[1:], shape=SHAPE if device == "gpu" else None)
    if report.with_own_models:
        await run([OF_THE_BUNDLED_PAIR], target=str(DEMO_TARGET), draft=str(DEMO_DRAFT))
    if not is_quick:
        await run((*CHECKS_OF_LAYERS, *(CHECKS_OF_BUFFERS if device == "gpu" else ())))


COMMAND = Command(
    name="selftest",
    usage="[options]",
    help="check Outrider's guarantees on this device",
    description="Check Outrider's guarantees on this device: greedy texts and seeds, two models at a time, "
    "streams and cancellations, failures, memory. Then measure which settings suit the device. Each check runs in a "
    "process of its own, so that a crash is only a failed check. This takes some minutes, in which nothing else should "
    "run.",
    epilog="""examples:
  outrider selftest
  outrider selftest --report report
  outrider selftest --target org/model --draft org/small --minutes 20

The report has neither paths nor prompts, and lists what it has. Attach it to an issue.""",
    add_arguments=_add_arguments,
    run=selftest,
    computes=False,
)
