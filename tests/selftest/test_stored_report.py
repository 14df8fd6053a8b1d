"""The last report of a self-test, as `outrider doctor` reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sweeps import sweep

from runtime.selftest.checks import Check, Finding
from runtime.selftest.report import SelfTestReport
from runtime.selftest.runner import CheckRun
from runtime.selftest.stored_report import keep, path_of_last_report, rows_of_last_report


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def report(*statuses: str) -> dict[str, Any]:
    runs = [
        CheckRun(Check(f"check_{number}", "module", f"meaning {number}"), Finding(status, "a summary"), 1.0)  # type: ignore[arg-type]
        for number, status in enumerate(statuses)
    ]
    return SelfTestReport(with_own_models=False, runs=runs).as_json()


def test_without_a_report_there_is_nothing_to_say() -> None:
    assert rows_of_last_report() == []


def test_a_report_is_kept_and_read(caches: Path) -> None:
    kept = report("passed", "passed")
    keep(kept)
    assert path_of_last_report() == caches / "outrider" / "selftest.json"
    assert [path.name for path in path_of_last_report().parent.iterdir()] == ["selftest.json"]
    assert rows_of_last_report() == [("result", f"2 of 2 checks passed ({kept['date']})")]


def test_failures_and_their_meaning_are_said() -> None:
    keep(report("passed", "failed", "crashed"))
    rows = dict(rows_of_last_report())
    assert rows["result"].startswith("2 of 3 checks failed")
    assert rows["failed: check 2"] == "this could not be checked"
    assert rows["failed: check 1"] == "meaning 1"


def test_the_settings_that_were_best_are_said() -> None:
    kept = report("passed")
    kept["results"]["settings"] = {"decoding": "outrider auto, 80 tokens/s"}
    keep(kept)
    assert ("best for the demo pair: decoding", "outrider auto, 80 tokens/s") in rows_of_last_report()


def test_a_report_of_another_version_is_out_of_date() -> None:
    kept = report("passed")
    kept["versions"]["mlx"] = "0.1.0"
    keep(kept)
    assert dict(rows_of_last_report())["out of date"] == "it was made with mlx 0.1.0; run outrider selftest again"


@sweep("content", ["", "{", "[]", "3", '{"format": 0}', '{"format": 1}', "\ud800"])
def test_what_is_no_report_is_passed_over(content: str) -> None:
    path_of_last_report().parent.mkdir(exist_ok=True)
    path_of_last_report().write_bytes(content.encode("utf-8", "surrogatepass"))
    assert rows_of_last_report() == []
