"""The processes of checks: whatever a check does, and however its process ends, is a finding."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import broken_checks
import pytest
import trio
import trio.testing
from polling import HANGS_S
from sweeps import sweep

from runtime.cli import main as cli
from runtime.loading import mlx_environment
from runtime.selftest import checks, runner
from runtime.selftest.checks import CHECKS, Check, Finding, Status
from runtime.selftest.report import SelfTestReport, summary
from runtime.selftest.runner import CheckRun, run_check, run_checks
from runtime.selftest.subject import Subject

SUPPORT = Path(__file__).parents[1] / "support"


def check(name: str, **changes: Any) -> Check:
    return Check(name, "broken_checks", "it is broken", **changes)


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT.parents[1]}:{SUPPORT}")


async def test_a_check_that_ends_well_has_its_own_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Modules of the current directory are not imported.
    (tmp_path / "runtime").mkdir()
    (tmp_path / "trio.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    finding = await run_check(check("finds", environment={"OUTRIDER_TEST": "x"}), {"seconds": 7})
    assert finding == Finding("passed", "all is well for 7 s", {"variable": "x"})


@sweep(
    ("name", "status", "says", "wrote"),
    [
        ("dies_of_a_signal", "crashed", "ended with the signal SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("raises", "failed", "the check ended with RuntimeError", "Traceback (most recent call last):"),
        pytest.param("exits", "crashed", "ended with status 3", "a last word", marks=pytest.mark.slow),
        pytest.param(
            "crashes_after_its_finding",
            "crashed",
            "SIGABRT, after this: all is well",
            "Fatal Python error: Aborted",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_however_a_check_ends_is_a_finding(name: str, status: str, says: str, wrote: str) -> None:
    finding = await run_check(check(name), {})
    assert finding.status == status
    assert says in finding.summary
    assert finding.figures["stderr"][0] == wrote


async def test_a_check_that_hangs_is_killed_and_says_where_it_was(
    tmp_path: Path, mock_clock: trio.testing.MockClock
) -> None:
    note, findings = fifo(tmp_path), []

    async def run() -> None:
        hanging = check("hangs", timeout_s=2.0, environment={"OUTRIDER_TEST_NOTE": str(note)})
        findings.append(await run_check(hanging, {"seconds": 1.0}))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        # However long the process takes to begin, its time is up only once it hangs.
        await written(note)
        mock_clock.jump(3.5)
    (finding,) = findings
    assert finding.status == "hung"
    assert finding.summary == "the check had not ended after 3 s"
    assert any("in hangs" in line for line in finding.figures["stderr"])


async def test_a_cancellation_kills_the_process(tmp_path: Path) -> None:
    note = fifo(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_check, check("hangs", environment={"OUTRIDER_TEST_NOTE": str(note)}), {})
        pid = int(await written(note))
        nursery.cancel_scope.cancel()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
async def test_a_process_ends_when_the_one_that_started_it_is_killed(tmp_path: Path) -> None:
    note = fifo(tmp_path)
    code = (
        "import sys, trio\n"
        "from runtime.selftest.checks import Check; from runtime.selftest.runner import run_check\n"
        "check = Check('hangs', 'broken_checks', '', environment={'OUTRIDER_TEST_NOTE': sys.argv[1]})\n"
        "trio.run(run_check, check, {})"
    )
    parent = await trio.lowlevel.open_process([sys.executable, "-c", code, str(note)])
    pid = int(await written(note))
    parent.kill()
    await parent.wait()
    await ended(pid)


def fifo(folder: Path) -> Path:
    """A FIFO to which another process can write its number."""
    os.mkfifo(folder / "pid")
    return folder / "pid"


async def written(note: Path) -> str:
    """What another process writes to a FIFO."""
    # Open for writing as well, so that its end is not read before the process has opened it.
    descriptor = os.open(note, os.O_RDWR | os.O_NONBLOCK)
    try:
        with trio.fail_after(HANGS_S):
            await trio.lowlevel.wait_readable(descriptor)
        return os.read(descriptor, 100).decode()
    finally:
        os.close(descriptor)


async def ended(pid: int) -> None:
    """Wait until a process that is not a child of this one has ended, reaped or not."""
    if not hasattr(os, "pidfd_open"):
        return  # only Linux tells
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            with trio.fail_after(HANGS_S):
                await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)


@pytest.mark.slow
async def test_a_process_does_not_inherit_what_the_runtime_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_environment, "_set_here", ["MLX_MAX_OPS_PER_BUFFER"])
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "1000")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "77")  # the user's
    found = await run_check(check("environment", environment={"OUTRIDER_TUNE_MLX": "0"}), {})
    assert found.figures == {"MLX_MAX_OPS_PER_BUFFER": None, "MLX_MAX_MB_PER_BUFFER": "77"}


@pytest.mark.slow
async def test_checks_run_in_order_and_the_report_has_words_and_json_without_paths(tmp_path: Path) -> None:
    said: list[str] = []
    report = SelfTestReport(with_own_models=True)
    await run_checks([check("finds"), check("raises")], {}, said.append, report.runs.append)
    assert said == ["check 1 of 2: finds", "check 2 of 2: raises"]
    assert [run.check.name for run in report.failures] == ["raises"]
    assert summary(report.runs) == "1 of 2 checks failed; attach the report of --report to an issue"
    assert summary(report.runs[:1]) == "1 of 1 checks passed"
    sections = dict(report.sections())
    assert sections["what that means"] == [("raises", "it is broken")]
    assert sections["checks"][1][1].startswith("FAILED: the check ended with RuntimeError")
    report.write(tmp_path / "report")
    written = (tmp_path / "report.json").read_text()
    assert "secret" not in written
    assert "<path>" in written


def of(name: str, status: Status, figures: dict[str, Any], **environment: str) -> CheckRun:
    (check,) = (each for each in CHECKS if each.name == name)
    return CheckRun(attrs.evolve(check, environment=environment), Finding(status, "", figures), 1.0)


def test_the_fastest_settings_are_named() -> None:
    runs = [
        of("speeds", "passed", {"tokens_per_second": {"mlx-lm plain": 50.0, "outrider lookahead auto": 80.0}}),
        of("speeds", "passed", {"tokens_per_second": {"outrider lookahead auto": 96.0}}, MLX_MAX_OPS_PER_BUFFER="7"),
    ]
    assert dict(dict(SelfTestReport(False, runs=runs).sections())["settings that were best here"]) == {
        "decoding": "outrider lookahead auto, 80 tokens/s",
        "environment": 'MLX_MAX_OPS_PER_BUFFER=7 (1.20 times the speed of "auto" without)',
    }


@pytest.mark.parametrize("status", ["crashed", "hung"])
def test_a_check_that_found_nothing_out_does_not_say_what_its_failure_would_mean(status: Status) -> None:
    report = SelfTestReport(False, runs=[of("noise", status, {})])
    assert dict(report.sections())["what that means"] == [("noise", "this could not be checked")]


@sweep(
    "text",
    [
        "/Users/john smith/models/secret/x.py",
        "no model at models/secret-llama",
        "~/models/secret/y",
        "../models/secret/y",
        "-I/home/me/secret/include",
        'File "/opt/secret place/site/thing.py", line 3, in call',
        "{'/srv/a/secret': 1}",
    ],
)
def test_no_path_is_in_the_report(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    secrets = ("models/secret-llama", "/Users/john smith/models/secret")
    report = SelfTestReport(True, secrets, [of("noise", "failed", {"error": text, text: [text]})])
    report.write(tmp_path / "report")
    written = (tmp_path / "report.json").read_text()
    assert "secret" not in written
    assert "john" not in written
    assert "line 3, in call" in written or "File" not in text


def test_the_variables_that_the_user_has_set_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_environment, "_set_here", ["MLX_MAX_OPS_PER_BUFFER"])
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "1000")
    monkeypatch.setenv("MLX_MAX_MB_PER_BUFFER", "77")
    monkeypatch.setenv("OUTRIDER_API_KEY", "s3cret")
    machine = SelfTestReport(False).device_report.machine
    assert machine["MLX_MAX_MB_PER_BUFFER"] == "77"
    assert "MLX_MAX_OPS_PER_BUFFER" not in machine
    assert "s3cret" not in machine.values()


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`outrider selftest` with checks of these tests in place of its own, in this process."""

    async def run_here(check: Check, subject: dict[str, Any]) -> Finding:
        given = {name: value for name, value in subject.items() if name != "device"}
        try:
            return getattr(broken_checks, check.name)(Subject(**given))  # type: ignore[no-any-return]
        except SystemExit:
            return Finding("crashed", "it ended")
        except RuntimeError as error:
            return Finding("failed", "it raised", {"error": str(error)})

    monkeypatch.setattr(runner, "run_check", run_here)
    monkeypatch.setattr(checks, "CHECKS_OF_LAYERS", ())

    def run(*names: str, arguments: Sequence[str] = ()) -> int:
        monkeypatch.setattr(checks, "CHECKS", tuple(check(name) for name in names))
        return cli.main(["selftest", *arguments])

    return run


def test_the_command_prints_and_writes_its_report(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("loads", "finds", arguments=["--report", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr()
    assert "all is well for 30 s" in printed.out
    assert "2 of 2 checks passed" in printed.err
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["results"]["checks"]["finds"]["status"] == "passed"
    page = (tmp_path / "report.md").read_text()
    assert page.startswith(f"## outrider selftest\n\n{written['contents']}\n\n### machine\n\n- processor: ")
    assert "- finds: all is well for 30 s" in page


async def test_a_check_is_skipped_when_the_time_is_up() -> None:
    report = SelfTestReport(False)
    await run_checks([check("hangs")], {}, lambda _: None, report.runs.append, deadline=trio.current_time())
    assert [run.finding for run in report.runs] == [Finding("skipped", "out of time")]


def test_quick_runs_the_checks_that_matter_most(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "QUICK", ("finds",))
    assert command("loads", "finds", "raises", arguments=["--quick"]) == 0
    printed = capsys.readouterr()
    assert "all is well for 5 s" in printed.out
    assert "raises" not in printed.out
    assert "2 of 2 checks passed" in printed.err


def test_beside_a_pair_of_ones_own_the_bundled_one_is_measured_too(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "OF_THE_BUNDLED_PAIR", check("finds", of_bundled_pair=True))
    assert command("loads", arguments=["--target", "my/secret", "--draft", "my/draft"]) == 0
    assert "finds of bundled pair" in " ".join(capsys.readouterr().out.replace("the ", "").split())


def test_a_failed_check_is_the_commands_status(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("loads", "raises", "exits") == 1
    printed = capsys.readouterr()
    assert "these checks failed: raises, exits" in printed.err
    assert "this could not be checked" in printed.out


def test_a_run_that_skips_most_checks_does_not_count_as_passed(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("loads", "skips", "skips") == 1
    said = capsys.readouterr().err
    assert "1 of 3 checks passed, 2 skipped" in said
    assert "most checks were skipped" in said
    assert command("loads", "skips") == 0


def test_nothing_else_is_checked_where_the_models_do_not_load(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("raises", "finds") == 1
    printed = capsys.readouterr()
    assert "the models cannot be loaded, so nothing was checked: [metal::malloc]" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--draft", "none"], "needs a draft model"),
        (["--draft", "ngram"], "needs a draft model"),
        (["--minutes", "0"], "--minutes must be a finite number above 0"),
        (["--report", "/"], "is a directory"),
        (["--cooldown", "-1"], "--cooldown must be a finite number of at least 0"),
        (["--json", "/nowhere/at/all.json"], "in no directory that exists"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_runs(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert command("hangs", arguments=arguments) == cli.MISUSED
    assert says in capsys.readouterr().err
