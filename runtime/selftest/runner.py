"""Runs checks, each in a process of its own, one after the other."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import trio

import runtime
from runtime.loading import mlx_environment
from runtime.selftest.checks import Check, Finding

# Last lines of stderr that are kept if a process crashed or hung: about the stacks of its threads.
NUM_LINES = 40
# Seconds that a hanging process has to print the stacks of its threads.
GRACE_S = 5.0


@attrs.frozen
class CheckRun:
    """A check that has run, what it found, and how many seconds it took."""

    check: Check
    finding: Finding
    seconds: float


async def run_checks(
    checks: Sequence[Check],
    subject: dict[str, Any],
    on_progress: Callable[[str], None],
    on_finding: Callable[[CheckRun], None],
    deadline: float = math.inf,
) -> None:
    """Run checks in order.

    Args:
        subject: fields of `Subject`, and "device", as JSON values.
        on_progress: called with a description of each check before it starts.
        on_finding: called after each check.
        deadline: on trio's clock; checks that have not ended by then are skipped.

    Cancellation: kills the process of the current check.
    """
    for number, check in enumerate(checks, start=1):
        on_progress(f"check {number} of {len(checks)}: {check.label}")
        began = trio.current_time()
        finding = Finding("skipped", "out of time")
        with trio.move_on_at(deadline):
            finding = await run_check(check, subject)
        on_finding(CheckRun(check, finding, trio.current_time() - began))


async def run_check(check: Check, subject: dict[str, Any]) -> Finding:
    """Run one check in a process of its own. A crash or a hang is a finding, too. A cancellation kills the process."""
    limit_s = check.timeout_s + float(subject.get("seconds", 0.0))
    process = await trio.lowlevel.open_process(
        # Without the current directory on the path, which may have modules of the same names.
        [sys.executable, "-P", "-X", "faulthandler", "-m", "runtime.selftest.check_process", check.module, check.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment() | check.environment,
        # A Ctrl-C is for the command, which cancels this.
        start_new_session=True,
    )
    stdout, stderr = bytearray(), bytearray()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, process.stdout, stdout)
            nursery.start_soon(_collect, process.stderr, stderr)
            nursery.start_soon(_hand_over, process.stdin, json.dumps(subject).encode() + b"\n")
            with trio.move_on_after(limit_s) as limit:
                await process.wait()
            if limit.cancelled_caught:
                process.send_signal(signal.SIGABRT)
                with trio.move_on_after(GRACE_S):
                    await process.wait()
                process.kill()
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                await stream.aclose()
    lines = bytes(stderr).decode(errors="replace").splitlines()[-NUM_LINES:]
    if limit.cancelled_caught:
        return Finding("hung", f"the check had not ended after {limit_s:g} s", {"stderr": lines})
    assert process.returncode is not None
    return finding_of(process.returncode, bytes(stdout).decode(errors="replace"), lines)


def _environment() -> dict[str, str]:
    """The environment without what Outrider has set in it, so that a check's process decides for itself."""
    environment = dict(os.environ)
    for name in mlx_environment.set_here():
        environment.pop(name, None)
    root = str(Path(runtime.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
    return environment


async def _collect(stream: trio.abc.ReceiveStream | None, into: bytearray) -> None:
    assert stream is not None
    async for data in stream:
        into += data


async def _hand_over(stdin: trio.abc.SendStream | None, data: bytes) -> None:
    """Send the subject. The stream stays open, since the process ends with it."""
    assert stdin is not None
    # If the process has already ended, that becomes its finding.
    with suppress(trio.BrokenResourceError):
        await stdin.send_all(data)


def finding_of(status: int, stdout: str, stderr: list[str]) -> Finding:
    """The finding of a process that has ended, from its status, stdout and the last lines of stderr."""
    last = stdout.strip().rpartition("\n")[2]
    try:
        finding = Finding(**json.loads(last))
    except (json.JSONDecodeError, TypeError):
        return Finding("crashed", f"the check's process ended with {_ending(status)}", {"stderr": stderr})
    if status != 0:
        # It had a finding, and died on its way out.
        return Finding(
            "crashed",
            f"the check's process ended with {_ending(status)}, after this: {finding.summary}",
            {**finding.figures, "stderr": stderr},
        )
    if finding.status == "failed" and stderr:
        return attrs.evolve(finding, figures={**finding.figures, "stderr": stderr})
    return finding


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return f"the signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
