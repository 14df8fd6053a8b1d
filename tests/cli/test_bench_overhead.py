"""The benchmark of the runtime itself: its runs, its figures, and its command. No speed is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

import runtime
from runtime.bench.overhead import OverheadMeasured, OverheadPlan, measure_overhead
from runtime.bench.tables import overhead_table
from runtime.cli import main as cli

OURS = ["outrider plain", "outrider resting", "outrider lookahead 2"]


def test_one_stream_is_compared_with_generate_step_and_more_with_batches() -> None:
    assert OverheadPlan().streams == (1, 4, 16, 64)
    assert OverheadPlan(streams=(1, 4)).runs == (
        *((1, way) for way in ("mlx-lm generate_step", "mlx-lm BatchGenerator", *OURS)),
        *((4, way) for way in ("mlx-lm BatchGenerator", *OURS)),
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"streams": (257,)}, "streams must be whole numbers between 1 and 256"),
        ({"max_tokens": 15}, "max_tokens must be a whole number of at least 16"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1"),
    ],
)
def test_what_is_out_of_range_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(runtime.SettingsError, match=complaint):
        OverheadPlan(**changes)


def test_figures_are_medians_of_complete_repeats_over_mlx_lm() -> None:
    measured = OverheadMeasured(OverheadPlan(streams=(1, 2), repeats=3))
    for repeat in (1.0, 3.0):
        measured.repeats.append({run: repeat * (10 + index) for index, run in enumerate(measured.plan.runs)})
    measured.repeats.append({measured.plan.runs[0]: 1.0})  # interrupted
    result = measured.result()
    assert (result.repeats_done, result.is_complete) == (2, False)
    first, last = result.rows[0], result.rows[-1]
    assert (first.way, first.median, first.low, first.high, first.vs_mlx_lm) == ("mlx-lm generate_step", 20, 10, 30, 1)
    assert last.vs_mlx_lm == pytest.approx(18 / 15)
    table = overhead_table(result)
    assert [row.cells[:2] for row in table.rows] == [(str(n), way) for n, way in measured.plan.runs]
    assert table.rows[0].cells[2:] == ("20.0", "10.0–30.0", "1.00")


def test_nothing_measured_is_no_figure() -> None:
    rows = OverheadMeasured(OverheadPlan(streams=(1,))).result().rows
    assert {(row.median, row.low, row.high, row.vs_mlx_lm) for row in rows} == {(None, None, None, None)}


@pytest.mark.slow
def test_every_run_is_measured() -> None:
    measured = OverheadMeasured(OverheadPlan(streams=(1, 3), max_tokens=16, repeats=1))
    steps: list[str] = []

    async def main() -> None:
        await measure_overhead(measured, on_progress=steps.append)

    trio.run(main)
    result = measured.result()
    assert result.is_complete
    assert all(row.median is not None and row.median > 0 for row in result.rows)
    assert steps[-1].startswith("repeat 1 of 1")


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--overhead", "--streams", "2", "--max-tokens", "16", "--repeats", "1"]
    assert cli.main(command) == 0
    assert "BatchGenerator" in capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    assert [row["way"] for row in json.loads(capsys.readouterr().out)["rows"]][1:] == OURS


def test_without_numbers_of_streams_the_command_measures_its_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[OverheadPlan] = []

    async def measure(measured: OverheadMeasured, **_: Any) -> None:
        plans.append(measured.plan)

    monkeypatch.setattr(runtime.bench.overhead, "measure_overhead", measure)
    assert cli.main(["bench", "--overhead", "--json"]) == 0
    assert plans == [OverheadPlan()]
    assert json.loads(capsys.readouterr().out)["repeats_done"] == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["-p", "x"], "--prompt"), (["-t", "1"], "--temperature"), (["--lookahead", "2"], "--lookahead")],
)
def test_what_it_takes_no_notice_of_is_refused(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--overhead", *flags]) != 0
    assert f"{named} does not go with --overhead" in " ".join(capsys.readouterr().err.split())
