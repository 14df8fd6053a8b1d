"""The report of a self-test, in words for a terminal and as JSON to attach to an issue; without paths and prompts."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown_path
from runtime.selftest.findings import FAILURES
from runtime.selftest.runner import CheckRun

PACKAGES = ("outrider", "mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "trio")
FORMAT = 1

# What looks like an absolute path in a message of somebody else's.
_PATH = re.compile(r"(?<![\w.])(?:/[^\s/'\":,()]+){2,}/?")


@attrs.define
class SelfTestReport:
    """What a self-test has found so far.

    Attributes:
        with_own_models: whether the models were the user's, and not the bundled pair.
        runs: the checks that have run.
    """

    with_own_models: bool
    runs: list[CheckRun] = attrs.field(factory=list)

    @property
    def failures(self) -> list[CheckRun]:
        """The checks that have failed, crashed or hung."""
        return [run for run in self.runs if run.finding.status in FAILURES]

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object, with every path taken out."""
        checks = {
            run.check.label: {
                **run.finding.as_json(),
                "seconds": round(run.seconds, 2),
                "environment": run.check.environment,
            }
            for run in self.runs
        }
        report = {"format": FORMAT, "machine": machine(), "own_models": self.with_own_models, "checks": checks}
        without_paths: dict[str, Any] = json.loads(_PATH.sub("<path>", json.dumps(report)))
        return without_paths

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titled tables of (name, value): the machine, every check, what failures mean, and the best settings."""
        checks = [(run.check.label, f"{_mark(run)}{run.finding.summary} ({run.seconds:.0f} s)") for run in self.runs]
        sections = [("machine", list(machine().items())), ("checks", checks)]
        if self.failures:
            sections.append(("what that means", [(run.check.label, run.check.meaning) for run in self.failures]))
        if settings := self._settings():
            sections.append(("settings that were best here", settings))
        return sections

    def _settings(self) -> list[tuple[str, str]]:
        figures = {run.check.label: run.finding.figures for run in self.runs if run.finding.status == "passed"}
        settings = []
        if by_interval := figures.get("switch intervals", {}).get("by_interval_s"):
            best = max(by_interval, key=lambda name: by_interval[name]["tokens_per_second"])
            gain = by_interval[best]["tokens_per_second"] / by_interval["0.005"]["tokens_per_second"]
            # Less may be noise.
            if gain > 1.03:
                settings.append(("sys.setswitchinterval", f"{best} ({gain:.2f} times the speed of Python's default)"))
        if speeds := figures.get("speeds", {}).get("tokens_per_second"):
            measured = {name: speed for name, speed in speeds.items() if speed}
            if measured:
                fastest = max(measured, key=lambda name: measured[name])
                settings.append(("decoding", f"{fastest}, {measured[fastest]:.0f} tokens/s"))
        return settings


def _mark(run: CheckRun) -> str:
    return "" if run.finding.status == "passed" else f"{run.finding.status.upper()}: "


def machine() -> dict[str, str]:
    """The machine and the versions, by name."""
    found = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def check_report_path(file: str | None) -> Path | None:
    """The path of a report, checked before anything runs.

    Raises: SettingsError: its directory does not exist.
    """
    if file is None:
        return None
    path = Path(file)
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"--json {shown_path(file)} is in no directory that exists; make that first")
    return path


def summary(runs: Sequence[CheckRun]) -> str:
    """One sentence on all checks."""
    num_failed = sum(run.finding.status in FAILURES for run in runs)
    if not num_failed:
        return f"all {len(runs)} checks passed"
    return f"{num_failed} of {len(runs)} checks failed; attach the report of --json to an issue"
