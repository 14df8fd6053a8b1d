"""The processes of checks: whatever a check does, and however its process ends, is a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.selftest.checks import CHECKS, Check
from runtime.selftest.findings import Finding
from runtime.selftest.report import SelfTestReport, summary
from runtime.selftest.runner import CheckRun, run_check, run_checks

SUPPORT = Path(__file__).parents[1] / "support"


def check(name: str, **changes: Any) -> Check:
    return Check(name, "broken_checks", "it is broken", **changes)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT.parents[1]}:{SUPPORT}")


async def test_a_check_that_ends_well_has_its_own_finding() -> None:
    finding = await run_check(check("finds", environment={"OUTRIDER_TEST": "x"}), {"seconds": 7})
    assert finding == Finding("passed", "all is well for 7 s", {"variable": "x"})


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("dies_of_a_signal", "crashed", "ended with the signal SIGSEGV"),
        ("exits", "crashed", "ended with status 3"),
        ("crashes_after_its_finding", "crashed", "SIGABRT, after this: all is well"),
        ("raises", "failed", "the check ended with RuntimeError"),
    ],
)
async def test_however_a_check_ends_is_a_finding(name: str, status: str, says: str) -> None:
    finding = await run_check(check(name), {})
    assert finding.status == status
    assert says in finding.summary


async def test_what_a_crashed_process_wrote_last_is_kept() -> None:
    finding = await run_check(check("exits"), {})
    assert finding.figures["stderr"] == ["a last word"]


async def test_a_check_that_hangs_is_killed_and_a_finding() -> None:
    finding = await run_check(check("hangs", timeout_s=3.0), {})
    assert finding.status == "hung"


async def test_a_cancellation_kills_the_process() -> None:
    with trio.move_on_after(2) as scope:
        await run_check(check("hangs"), {})
    assert scope.cancelled_caught


async def test_checks_run_in_order_and_the_report_has_words_and_json_without_paths() -> None:
    said: list[str] = []
    report = SelfTestReport(with_own_models=True)
    await run_checks([check("finds"), check("raises")], {}, said.append, report.runs.append)
    assert said == ["check 1 of 2: finds", "check 2 of 2: raises"]
    assert [run.check.name for run in report.failures] == ["raises"]
    assert summary(report.runs) == "1 of 2 checks failed; attach the report of --json to an issue"
    sections = dict(report.sections())
    assert sections["what that means"] == [("raises", "it is broken")]
    assert sections["checks"][1][1].startswith("FAILED: the check ended with RuntimeError")
    written = json.dumps(report.as_json())
    assert "secret" not in written
    assert "<path>" in written


def test_the_fastest_settings_are_named() -> None:
    speeds = {"tokens_per_second": {"mlx-lm plain": 50.0, "outrider lookahead auto": 80.0}}
    intervals = {"by_interval_s": {"0.005": {"tokens_per_second": 50.0}, "0.001": {"tokens_per_second": 60.0}}}
    runs = [
        CheckRun(check, Finding("passed", "", figures), 1.0)
        for check in CHECKS
        if (figures := {"speeds": speeds, "switch_intervals": intervals}.get(check.name)) is not None
    ]
    settings = dict(SelfTestReport(False, runs).sections())["settings that were best here"]
    assert dict(settings) == {
        "sys.setswitchinterval": "0.001 (1.20 times the speed of Python's default)",
        "decoding": "outrider lookahead auto, 80 tokens/s",
    }
