"""The benchmark of the runtime itself: its runs, its figures, and its command. No speed is asserted."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import trio
from command_line import json_of, ran

import runtime
from runtime.bench.contenders import Contender, Run
from runtime.bench.overhead import CONTENDERS, Overhead, OverheadPlan
from runtime.cli import main as cli

OURS = ["outrider plain", "outrider resting", "outrider lookahead 2"]


def test_one_stream_is_compared_with_generate_step_and_more_with_batches() -> None:
    assert OverheadPlan().streams == (1, 4, 16, 64)
    contest = Overhead(OverheadPlan(streams=(1, 4))).contest
    ways = [[contender.name for contender in contest.contenders_of(streams)] for streams in (1, 4)]
    assert ways == [["mlx-lm generate_step", "mlx-lm BatchGenerator", *OURS], ["mlx-lm BatchGenerator", *OURS]]


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


def a_run(microseconds: float) -> Run:
    return Run(texts=((1, 2),), seconds=2e-6 * microseconds, num_timed=2)


def test_figures_are_medians_of_complete_repeats_over_mlx_lm() -> None:
    overhead = Overhead(OverheadPlan(streams=(1, 2), repeats=3))
    turns: dict[tuple[int, int], dict[Contender, Run]] = overhead.contest.turns
    for repeat, factor in enumerate((1.0, 3.0)):
        for place, streams in enumerate((1, 2)):
            ways = overhead.contest.contenders_of(streams)
            turns[repeat, streams] = {way: a_run(factor * (10 + 5 * place + i)) for i, way in enumerate(ways)}
    turns[2, 1] = {CONTENDERS[0]: a_run(1.0)}  # interrupted
    result = overhead.result()
    assert (result.repeats_done, result.is_complete) == (2, False)
    first, last = result.rows[0], result.rows[-1]
    figures = pytest.approx((20, 10, 30, 1))
    assert (first.way, (first.median, first.low, first.high, first.vs_mlx_lm)) == ("mlx-lm generate_step", figures)
    assert last.vs_mlx_lm == pytest.approx(18 / 15)
    table = overhead.report(result).table
    ways = [(row.streams, row.way) for row in result.rows]
    assert [row.cells[:2] for row in table.rows] == [(str(streams), way) for streams, way in ways]
    assert table.rows[0].cells[2:] == ("20.0", "10.0–30.0", "1.00")


def test_nothing_measured_is_no_figure() -> None:
    rows = Overhead(OverheadPlan(streams=(1,))).result().rows
    assert {(row.median, row.low, row.high, row.vs_mlx_lm) for row in rows} == {(None, None, None, None)}


@pytest.mark.slow
def test_every_run_is_measured() -> None:
    overhead = Overhead(OverheadPlan(streams=(1, 3), max_tokens=16, repeats=1))
    steps: list[str] = []
    result = trio.run(partial(overhead.measure, on_progress=steps.append))
    assert result.is_complete
    assert all(row.median is not None and row.median > 0 for row in result.rows)
    assert [step.partition(":")[0] for step in steps[-2:]] == ["repeat 1 of 1, 3 at once", "closing"]
    assert result.clock is not None


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--overhead", "--streams", "2", "--max-tokens", "16", "--repeats", "1"]
    assert "BatchGenerator" in ran(capsys, *command).out
    assert [row["way"] for row in json_of(capsys, *command, "--json")["rows"]][1:] == OURS


def test_without_numbers_of_streams_the_command_measures_its_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans: list[OverheadPlan] = []

    async def measure(self: Overhead, **_: Any) -> None:
        plans.append(self.plan)

    monkeypatch.setattr(Overhead, "measure", measure)
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
