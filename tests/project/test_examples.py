"""The examples run as they are, without arguments, and print what they promise."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parents[2]


Run = Callable[..., list[str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example as a program, in this process, which has imported everything, and returns the lines it prints.

    Its target is as small as its draft model, except where a text must be endless for half a second.
    """

    def run_one(name: str, *arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        if name not in ("cancelling.py", "asyncio_stream.py"):
            monkeypatch.setattr(runtime, "DEMO_TARGET", runtime.DEMO_DRAFT)
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        out, err = capfd.readouterr()
        assert err == ""
        return out.splitlines()

    return run_one


def run_process(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        # Ends a hang; not an expectation.
        timeout=120,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.splitlines()


@pytest.mark.slow
def test_minimal_stream_continues_its_prompt(run: Run):
    said = "\n".join(run("minimal_stream.py"))
    prompt = "def quicksort(items):"
    assert said.startswith(prompt)
    assert len(said) > len(prompt) + 20


@pytest.mark.slow
def test_cancelling_ends_four_generations_and_each_time_the_next_one_answers(run: Run):
    said = run("cancelling.py")
    ended, answered = said[::2], said[1::2]
    patterns = [
        r"timeout: cancelled is True, after half a second and \d+ tokens",
        r"break: enough after 20 tokens",
        r"async with: left after 10 tokens",
        r"aclose: after the token '.*', this stream was closed; begin another with stream\(\)",
    ]
    for line, pattern in zip(ended, patterns, strict=True):
        assert re.fullmatch(pattern, line)
    for line in answered:
        assert re.fullmatch(r"    the next stream began to answer after \d+ ms: '.+'", line)
    assert len(answered) == len(ended)


@pytest.mark.slow
def test_several_streams_label_their_lines_and_add_up(run: Run):
    said = run("several_streams.py")
    end = said.index("")
    lines = [line.partition(" | ") for line in said[:end]]
    firsts = {}
    for label, bar, text in lines:
        assert bar
        firsts.setdefault(label.strip(), text)
    assert {label: text.partition(":")[0] for label, text in firsts.items()} == {
        "stack": "class Stack",
        "sort": "def quicksort(items)",
        "read": "def read_lines(path)",
    }
    # The streams alternate: none waits for another to end.
    labels = [label.strip() for label, _, _ in lines]
    assert labels != sorted(labels, key=list(firsts).index)
    numbers = {row.split()[0]: int(row.split()[1]) for row in said[end + 2 :]}
    assert list(numbers)[-1] == "all"
    assert numbers.pop("all") == sum(numbers.values()) > 0
    assert numbers.keys() == firsts.keys()


@pytest.mark.slow
def test_json_output_prints_what_the_schema_asks_for_and_was_speculated_with(run: Run):
    *fields, counts = run("json_output.py")
    written = {name.strip(): ast.literal_eval(value) for name, _, value in (line.partition(": ") for line in fields)}
    assert list(written) == ["name", "language", "lines", "imports"]
    assert written["language"] in ("Python", "C", "Rust")
    assert 0 <= written["lines"] <= 5000
    match = re.fullmatch(r"(\d+) tokens, (\d+) of them drafted", counts)
    assert match
    assert 0 < int(match[2]) < int(match[1])


@pytest.mark.slow
def test_asyncio_stream_runs_streams_beside_other_work_and_ends_one_by_timeout(run: Run):
    said = run("asyncio_stream.py")
    shown = [line.partition(" | ") for line in said if " | " in line]
    assert {label.strip() for label, _, _ in shown} == {"stack", "sort"}
    turns, timeout, *many = said[len(shown) :]
    free = re.fullmatch(r"meanwhile, the loop was free for other work (\d+) times", turns)
    # At least once for each line.
    assert int(free[1]) > len(shown)
    assert re.fullmatch(r"timeout: after half a second and \d+ tokens", timeout)
    assert sorted(many) == ["prompt 0: 8 tokens", "prompt 1: 8 tokens"]


@pytest.mark.slow
def test_first_of_three_has_a_winner_and_leaves_the_models_free(run: Run):
    *race, end = run("first_of_three.py")
    outcomes = [line for line in race if line.startswith("the answer of seed ")]
    assert len(outcomes) == 3
    wins = [re.fullmatch(r"the answer of seed \d wins, after (\d+) characters", line) for line in outcomes]
    cancelled = [re.fullmatch(r"the answer of seed \d was cancelled, after \d+ characters", line) for line in outcomes]
    assert [bool(line) for line in wins] == [not line for line in cancelled]
    (winner,) = filter(None, wins)
    text = "\n".join(race[len(outcomes) :])
    assert text.startswith("def quicksort(items):")
    assert len(text) - len("def quicksort(items):") == int(winner[1])
    assert re.fullmatch(r"the models were free: the next answer began after \d+ ms", end)


@pytest.mark.slow
def test_measure_ranks_says_what_a_round_takes_beyond_its_pass():
    _, one, several, end = run_process("measure_ranks.py", "--rounds", "5", "--repeats", "1", "--layers", "2")
    beyond = []
    for line, name in ((one, "one process"), (several, "2 ranks")):
        alone, in_pass, in_round, beyond_alone = map(float, line.removeprefix(name.rjust(14)).split())
        assert 0 < in_pass <= in_round
        assert beyond_alone == pytest.approx(in_round - alone, abs=0.02)
        beyond.append(beyond_alone)
    match = re.fullmatch(r"ranks add (-?\d+\.\d\d) ms to what a round takes beyond its pass", end)
    assert match
    assert float(match[1]) == pytest.approx(beyond[1] - beyond[0], abs=0.02)


@pytest.mark.parametrize("name", ["terminal.py", "trio_service.py"])
def test_a_program_that_goes_on_until_it_is_ended_says_how_it_is_used(
    name: str, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(name, "--help")
    assert f"python examples/{name}" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), "error: stdin is no terminal, and this program is nothing without one", ""),
        (("--temperature", "-1"), 2, "temperature must be"),
    ],
    ids=["no terminal", "no temperature"],
)
def test_the_terminal_example_says_what_makes_no_sense_before_a_model_is_loaded(
    arguments: tuple[str, ...],
    code: object,
    said: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as left:
        run("terminal.py", *arguments)
    assert left.value.code == code
    assert said in capfd.readouterr().err
