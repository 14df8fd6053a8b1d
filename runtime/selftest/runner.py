"""Runs checks, each in a process of its own, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import trio

from runtime.selftest.checks import Check
from runtime.selftest.findings import Finding

# Lines of a crashed process's stderr that are kept.
NUM_LINES = 12


@attrs.frozen
class CheckRun:
    """A check that has run.

    Attributes:
        check: the check.
        finding: what it found.
        seconds: how long it took.
    """

    check: Check
    finding: Finding
    seconds: float


async def run_checks(
    checks: Sequence[Check],
    subject: dict[str, Any],
    on_progress: Callable[[str], None],
    on_finding: Callable[[CheckRun], None],
) -> None:
    """Run checks in order.

    Args:
        checks: which.
        subject: fields of `Subject`, and "device"; as JSON has them.
        on_progress: called with a description of each check before it starts.
        on_finding: called after each check.

    Cancellation: kills the process of the current check.
    """
    for number, check in enumerate(checks, start=1):
        on_progress(f"check {number} of {len(checks)}: {check.label}")
        began = trio.current_time()
        finding = await run_check(check, subject)
        on_finding(CheckRun(check, finding, trio.current_time() - began))


async def run_check(check: Check, subject: dict[str, Any]) -> Finding:
    """Run one check in a process of its own; that it crashes or hangs is its finding then.

    Args: as `run_checks`.

    Cancellation: kills the process.
    """
    command = [sys.executable, "-m", "runtime.selftest.check_process", check.module, check.name]
    with trio.move_on_after(check.timeout_s + float(subject.get("seconds", 0.0))):
        done = await trio.run_process(
            command,
            stdin=json.dumps(subject).encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env=os.environ | check.environment,
            # A Ctrl-C is for the command, which cancels this.
            start_new_session=True,
        )
        return finding_of(done)
    return Finding("hung", f"the check had not ended after {check.timeout_s:g} s", {})


def finding_of(done: subprocess.CompletedProcess[bytes]) -> Finding:
    """The finding of a process that has ended."""
    last = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    tail = done.stderr.decode(errors="replace").splitlines()[-NUM_LINES:]
    try:
        finding = Finding(**json.loads(last))
    except (json.JSONDecodeError, TypeError):
        return Finding("crashed", f"the check's process ended with {_ending(done.returncode)}", {"stderr": tail})
    if done.returncode != 0:
        # It had a finding, and died on its way out.
        return Finding(
            "crashed",
            f"the check's process ended with {_ending(done.returncode)}, after this: {finding.summary}",
            {**finding.figures, "stderr": tail},
        )
    return finding


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return f"the signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
