"""The report of a self-test, in words for a terminal and as JSON to attach to an issue; without paths and prompts."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from runtime.loading.device import processor_name
from runtime.loading.mlx_environment import set_here
from runtime.selftest.checks import FAILURES
from runtime.selftest.runner import CheckRun
from runtime.selftest.stored_report import FORMAT, versions

_PREFIXES = ("MLX_", "OUTRIDER_")

# A smaller gain may be noise.
MIN_GAIN = 1.05

# What looks like an absolute path in a message of somebody else's, and the file in a line of a traceback.
_PATH = re.compile(r"(?<![\w.<>])(?:~|\.\.?)?(?:/[^\s/'\":,()]+){2,}/?")
_REST_OF_PATH = r"(?:/[^\s'\":,()]*)?"
_FILE_OF_TRACEBACK = re.compile(r'File "(?:[^"]*/)?([^"/]+)"')
PACKAGE = Path(__file__).resolve().parents[2]


@attrs.define
class SelfTestReport:
    """What a self-test has found so far.

    Attributes:
        with_own_models: whether the models were the user's, and not the bundled pair.
        secrets: texts that the report must not have, such as the paths of the models.
        runs: the checks that have run.
    """

    with_own_models: bool
    secrets: tuple[str, ...] = ()
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
            "failures": {run.check.label: _meaning(run) for run in self.failures},
            "settings": dict(self._settings()),
            "checks": checks,
        }
        without_paths: dict[str, Any] = _without_paths(report, self._known_paths())
        return without_paths

    def _known_paths(self) -> list[str]:
        """Paths that may occur in messages, the longest first: a path in another one goes with it."""
        home = os.path.expanduser("~")
        places = (home, os.getcwd(), sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(PACKAGE))
        known = {*self.secrets, *places, *map(os.path.realpath, places)}
        return sorted(known - {"", "/", ".", "~"}, key=len, reverse=True)

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titled tables of (name, value): the machine, every check, what failures mean, and the best settings."""
        checks = [(run.check.label, f"{_mark(run)}{run.finding.summary} ({run.seconds:.0f} s)") for run in self.runs]
        sections = [("machine", list(machine().items())), ("checks", checks)]
        if self.failures:
            sections.append(("what that means", [(run.check.label, _meaning(run)) for run in self.failures]))
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
            if (best_s := run.finding.figures.get("best_s")) != run.finding.figures.get("default_s"):
                settings.append(("sys.setswitchinterval", f"{best_s:g}"))
        return settings


def _without_paths(value: Any, known: Sequence[str]) -> Any:
    """A value of JSON with every path in its texts taken out.

    Args:
        value: the value.
        known: paths that may occur, the longest first.
    """
    if isinstance(value, str):
        value = _FILE_OF_TRACEBACK.sub(r'File "\1"', value)
        for path in known:
            value = re.sub(re.escape(path) + _REST_OF_PATH, "<path>", value)
        return _PATH.sub("<path>", value)
    if isinstance(value, dict):
        return {_without_paths(key, known): _without_paths(each, known) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_paths(each, known) for each in value]
    return value


def _meaning(run: CheckRun) -> str:
    return run.check.meaning if run.finding.status == "failed" else "this could not be checked"


def _mark(run: CheckRun) -> str:
    return "" if run.finding.status == "passed" else f"{run.finding.status.upper()}: "


def machine() -> dict[str, str]:
    """The machine, the versions, and the variables of MLX and of Outrider that the user has set, by name."""
    ours = set_here()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "python": platform.python_version(),
        **versions(),
        **{name: value for name, value in os.environ.items() if name.startswith(_PREFIXES) and name not in ours},
    }


def summary(runs: Sequence[CheckRun]) -> str:
    """One sentence on all checks."""
    num_failed = sum(run.finding.status in FAILURES for run in runs)
    num_skipped = sum(run.finding.status == "skipped" for run in runs)
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    if num_failed:
        return f"{num_failed} of {len(runs)} checks failed{skipped}; attach the report of --json to an issue"
    return f"{len(runs) - num_skipped} checks passed{skipped}"
