"""`outrider bench --overhead`: what it measures, prints and refuses. No speed is asserted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from command_line import json_of, ran

from runtime.bench.overhead import Overhead

OURS = ["outrider plain", "outrider resting", "outrider lookahead 2"]


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_way_and_number_of_streams(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--overhead", "--streams", "1,3", "--max-tokens", "16", "--repeats", "1"]
    out, err = ran(capsys, *command)
    assert "the target is" not in err  # it has models of its own
    _, table, notes = out.split("\n\n", 2)
    names = [re.split(r" {2,}", line)[1] for line in table.splitlines()[2:]]
    assert names == ["mlx-lm generate_step", "mlx-lm BatchGenerator", *OURS, "mlx-lm BatchGenerator", *OURS]
    assert notes.startswith("Microseconds a token of all streams")
    said = json_of(capsys, *command, "--json")
    assert said["is_complete"]
    assert [row["name"] for row in said["rows"]] == names
    assert all(row["median"] > 0 for row in said["rows"])


def test_without_numbers_of_streams_the_command_measures_its_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    streams: list[tuple[int, ...]] = []

    async def measure(self: Overhead, *_: Any, **__: Any) -> None:
        streams.append(self.streams)

    monkeypatch.setattr(Overhead, "measure", measure)
    assert json_of(capsys, "bench", "--overhead", "--json")["repeats_done"] == 0
    assert streams == [Overhead().streams]
