"""The report of a self-test, in words for a terminal and as JSON to attach to an issue; without paths and prompts."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from protocol.errors import SettingsError
from protocol.reprs import shown_path
from runtime.selftest.findings import FAILURES
from runtime.selftest.runner import CheckRun
from runtime.selftest.stored_report import FORMAT, versions

# A smaller gain may be noise.
MIN_GAIN = 1.05
# Python's own switch interval, in seconds.
DEFAULT_INTERVAL = "0.005"

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
        report = {
            "format": FORMAT,
            "date": datetime.now(UTC).date().isoformat(),
            "summary": summary(self.runs),
            "machine": machine(),
            "own_models": self.with_own_models,
            "failures": {run.check.label: run.check.meaning for run in self.failures},
            "settings": dict(self._settings()),
            "checks": checks,
        }
        without_paths: dict[str, Any] = _without_paths(report)
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
        """What was fastest, as rows of (name, text): decoding, MLX's variables, the switch interval."""
        settings = []
        passed = [run for run in self.runs if run.finding.status == "passed"]
        speeds = [run for run in passed if run.check.name == "speeds"]
        by_contender = {
            name: speed
            for run in speeds
            if not run.check.variables
            for name, speed in run.finding.figures["tokens_per_second"].items()
            if speed
        }
        if by_contender:
            fastest = max(by_contender, key=lambda name: by_contender[name])
            settings.append(("decoding", f"{fastest}, {by_contender[fastest]:.0f} tokens/s"))
        of_auto = {
            run.check.variables: speed
            for run in speeds
            if (speed := run.finding.figures["tokens_per_second"].get("outrider lookahead auto"))
        }
        if "" in of_auto and (best := max(of_auto, key=lambda name: of_auto[name])):
            gain = of_auto[best] / of_auto[""]
            if gain > MIN_GAIN:
                settings.append(("environment", f'{best} ({gain:.2f} times the speed of "auto" without)'))
        for run in passed:
            if by_interval := run.finding.figures.get("by_interval_s"):
                best = max(by_interval, key=lambda name: by_interval[name]["tokens_per_second"])
                gain = by_interval[best]["tokens_per_second"] / by_interval[DEFAULT_INTERVAL]["tokens_per_second"]
                if gain > MIN_GAIN:
                    text = f"{best} ({gain:.2f} times the speed of Python's default)"
                    settings.append(("sys.setswitchinterval", text))
        return settings


def _without_paths(value: Any) -> Any:
    """A value of JSON with every path in its texts taken out."""
    if isinstance(value, str):
        return _PATH.sub("<path>", value)
    if isinstance(value, dict):
        return {key: _without_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each) for each in value]
    return value


def _mark(run: CheckRun) -> str:
    return "" if run.finding.status == "passed" else f"{run.finding.status.upper()}: "


def machine() -> dict[str, str]:
    """The machine and the versions, by name."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **versions(),
    }


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
