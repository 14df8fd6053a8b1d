"""The report of a self-test, in words for a terminal and as JSON to attach to an issue; without paths and prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from runtime.measuring.machine import machine
from runtime.measuring.report_files import DeviceReport, PriceTable
from runtime.selftest.checks import FAILURES
from runtime.selftest.runner import CheckRun
from runtime.terminal.tables import TableRow, TextTable

# A smaller gain may be noise.
MIN_GAIN = 1.05


@attrs.define
class SelfTestReport:
    """What a self-test has found so far."""

    with_own_models: bool
    secrets: tuple[str, ...] = ()  # texts that the report must not have, such as the paths of the models
    runs: list[CheckRun] = attrs.field(factory=list)

    @property
    def failures(self) -> list[CheckRun]:
        """The checks that have failed, crashed or hung."""
        return [run for run in self.runs if run.finding.status in FAILURES]

    @property
    def is_hollow(self) -> bool:
        """Whether most checks were skipped, so that little is known about the device."""
        return 2 * sum(run.finding.status == "skipped" for run in self.runs) > len(self.runs)

    @property
    def device_report(self) -> DeviceReport:
        """The report that is written."""
        checks = {
            run.check.label: {
                **run.finding.as_json(),
                "seconds": round(run.seconds, 2),
                "environment": run.check.environment,
            }
            for run in self.runs
        }
        results = {
            "summary": summary(self.runs),
            "own_models": self.with_own_models,
            "failures": {run.check.label: _meaning(run) for run in self.failures},
            "settings": dict(self._settings()),
            "checks": checks,
        }
        tables = [PriceTable(**table) for run in self.runs for table in run.finding.figures.get("price_tables", ())]
        return DeviceReport("selftest", machine(), results, tables)

    def write(self, path: Path) -> None:
        """Write the report for an issue, with every path taken out; see `DeviceReport.write`."""
        self.device_report.write(path, "outrider selftest", self.sections(), self._speeds(), self.secrets)

    def _speeds(self) -> list[tuple[str, TextTable]]:
        tables = []
        for run in self.runs:
            if speeds := run.finding.figures.get("tokens_per_second"):
                rows = [TableRow((name, f"{speed:.1f}")) for name, speed in speeds.items() if isinstance(speed, float)]
                tables.append((run.check.label.capitalize(), TextTable(("", "tokens/s"), tuple(rows))))
        return tables

    def sections(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Titled tables of (name, value): the machine, every check, what failures mean, and the best settings."""
        checks = []
        for run in self.runs:
            mark = "" if run.finding.status == "passed" else f"{run.finding.status.upper()}: "
            checks.append((run.check.label, f"{mark}{run.finding.summary} ({run.seconds:.0f} s)"))
        sections = [("machine", list(machine().items())), ("checks", checks)]
        if self.failures:
            sections.append(("what that means", [(run.check.label, _meaning(run)) for run in self.failures]))
        if settings := self._settings():
            sections.append(("settings that were best here", settings))
        return sections

    def _settings(self) -> list[tuple[str, str]]:
        """What was fastest, as rows of (name, text): decoding, and variables of MLX and Outrider."""
        settings = []
        speeds = [run for run in self.runs if run.check.name == "speeds" and run.finding.status == "passed"]
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
        return settings


def _meaning(run: CheckRun) -> str:
    return run.check.meaning if run.finding.status == "failed" else "this could not be checked"


def summary(runs: Sequence[CheckRun]) -> str:
    """One sentence on all checks."""
    num_failed = sum(run.finding.status in FAILURES for run in runs)
    num_skipped = sum(run.finding.status == "skipped" for run in runs)
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    if num_failed:
        return f"{num_failed} of {len(runs)} checks failed{skipped}; attach the report of --report to an issue"
    return f"{len(runs) - num_skipped} of {len(runs)} checks passed{skipped}"
