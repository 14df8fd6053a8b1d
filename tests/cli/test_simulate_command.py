"""`outrider simulate`: output, files, and errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from command_line import ran, refusal
from plot_texts import texts_of
from sweeps import sweep

from actors.drafters.drafter import policy_by_settings
from protocol.lookahead_policy import ChainPolicy
from protocol.prices import Prices
from protocol.settings import Settings
from runtime.cli import main as cli
from runtime.cli import simulate_command
from runtime.measuring.figures import Record
from runtime.simulation.comparison import (
    LOOKAHEADS,
    NUM_TOKENS,
    STREAM_LOOKAHEADS,
    STREAM_TOKENS,
    StreamsComparison,
    compare,
    compare_streams,
)
from runtime.simulation.scenario import Scenario, described
from runtime.simulation.simulation import run_simulation, simulate_streams

TOKENS = 40
SCENARIO = ("--acceptance", "0.8", "--cost-ratio", "0.1")
QUICK = ("--tokens", str(TOKENS), "--lookahead", "1,3")


@pytest.fixture(autouse=True, scope="module")
def once() -> Iterator[None]:
    """Simulates what several tests look at once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("compare", "compare_streams"):
            patch.setattr(simulate_command, name, remembering(getattr(simulate_command, name)))
        yield


def remembering(compared: Callable[..., Any]) -> Callable[..., Any]:
    comparisons: dict[str, Any] = {}

    def compare(*scenario: Any, on_progress: Any) -> Any:
        if (key := repr(scenario)) not in comparisons:
            comparisons[key] = compared(*scenario, on_progress=on_progress)
        return comparisons[key]

    return compare


def simulate(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The output; asserts success."""
    out, err = ran(capfd, "simulate", *SCENARIO, *QUICK, *arguments)
    assert err == ""
    return str(out)


def refused(capfd: pytest.CaptureFixture[str], *arguments: str, status: int = cli.MISUSED) -> str:
    return refusal(capfd, "simulate", *SCENARIO, *arguments, status=status)


def table(printed: str) -> dict[tuple[str, str], dict[str, str]]:
    """The table's rows, by decoding and lookahead."""
    row = re.compile(
        r"(?P<decoding>[a-z]+(?: [a-z]+)?) +(?P<lookahead>\S+) +(?P<speed>[\d.]+)× +(?P<per_round>[\d.]+) +"
        r"(?P<accepted>\S+) +(?P<hits>\S+) +(?P<target>\S+) +(?P<draft>\S+) *(?P<mark>\S*) *"
    )
    matches = [match.groupdict() for line in printed.splitlines() if (match := row.fullmatch(line))]
    return {(match["decoding"], match["lookahead"]): match for match in matches}


# --- the table and the JSON -----------------------------------------------------------------------


def test_the_table_has_a_row_for_each_way_of_decoding(capfd):
    printed = simulate(capfd)
    rows = table(printed)
    assert list(rows) == [
        ("plain", "–"),
        ("sequential", "1"),
        ("sequential", "3"),
        ("single chain", "auto"),
        ("tree", "auto"),
    ]
    assert printed.startswith("acceptance 0.8, cost ratio 0.1, contention 0, verify slope 0.06; 40 tokens, seed 0\n")
    assert rows["plain", "–"]["speed"] == rows["plain", "–"]["per_round"] == "1.00"
    assert rows["plain", "–"]["accepted"] == rows["plain", "–"]["draft"] == "–"
    assert [key for key, row in rows.items() if row["mark"] == "best"] == [("sequential", "3")]


def test_a_table_fits_a_terminal_of_80_columns(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = simulate(capfd, "--lookahead", "64", "--overhead", "0.001")
    assert "…" not in printed
    assert set(table(printed)) >= {("sequential", "64"), ("single chain", "auto")}


def test_the_figures_are_those_of_the_simulation(capfd):
    contenders = json.loads(simulate(capfd, "--json"))["contenders"]
    scenario = Scenario(0.8, 0.1)

    def sequential(settings: Settings, prices: Prices) -> ChainPolicy:
        return ChainPolicy(3, overlaps=False)

    for contender, result in (
        (contenders[0], run_simulation(scenario, num_tokens=TOKENS, lookahead=0)),
        (contenders[2], run_simulation(scenario, num_tokens=TOKENS, make_policy=sequential)),
        (contenders[4], run_simulation(scenario, num_tokens=TOKENS, make_policy=policy_by_settings)),
    ):
        assert contender["speed"] == pytest.approx(result.speed)
        assert contender["tokens_per_round"] == result.statistics.tokens_per_round
        assert contender["acceptance_rate"] == result.statistics.acceptance_rate
        assert contender["draft_busy"] == result.statistics.draft_busy


def test_speeds_are_relative_to_plain_decoding_with_its_overhead():
    comparison = compare(Scenario(1.0, 0.5, overhead=1.0, verify_slope=0.0), 60, [2])
    plain, sequential = comparison.rows[:2]
    assert plain.speed == 1.0
    assert run_simulation(comparison.scenario, num_tokens=60, lookahead=0).speed == pytest.approx(0.5)
    # Three tokens for two draft steps of 1.5 and a pass of 2; plain decoding takes 2 for each token.
    assert sequential.speed == pytest.approx(3 * 2 / (2 * 1.5 + 2))


def test_the_json_says_what_was_simulated_and_what_came_of_it(capfd):
    found = json.loads(simulate(capfd, "--json", "--contention", "0.5", "--seed", "7", "--spread", "4"))
    assert found["scenario"] == attrs.asdict(
        Scenario(0.8, 0.1, contention=0.5, spread=4.0, seed=7), filter=lambda field, _: field.name in found["scenario"]
    ) | {"acceptance_changes": [], "verify_table": [], "draft_table": []}
    assert found["tokens"] == TOKENS
    speeds = {(c["decoding"], c["lookahead"]): c["speed"] for c in found["contenders"]}
    assert list(speeds) == [
        ("plain", 0),
        ("sequential", 1),
        ("sequential", 3),
        ("single chain", "auto"),
        ("tree", "auto"),
    ]
    best = found["best_sequential_lookahead"]
    assert speeds["sequential", best] == max(speeds["sequential", k] for k in (1, 3))
    assert found["tree_over_best_sequential"] == speeds["tree", "auto"] / speeds["sequential", best]


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_the_same_arguments_give_the_same_output_and_another_seed_another(capfd, monkeypatch, form):
    monkeypatch.setattr(simulate_command, "compare", compare)  # each time
    first, again, other = (simulate(capfd, "--seed", seed, *form) for seed in ("1", "1", "2"))
    assert again == first
    assert other != first


def test_only_drafting_ahead_has_hits():
    comparison = compare(Scenario(0.8, 0.1), 40, [4])
    assert [contender.hit_rate > 0 for contender in comparison.rows] == [False, False, True, True]
    assert [contender.decoding for contender in comparison.rows[2:]] == ["single chain", "tree"]


def test_the_tree_drafts_for_corrections_and_the_single_chain_does_not():
    # If the first choice is always wrong and the second always right, a single chain never hits.
    comparison = compare(Scenario(0.3, 0.01, second_choice=1.0, spread=1000.0, seed=1), 50, [1])
    single_chain, tree = comparison.rows[2:]
    assert tree.hit_rate > 1.5 * single_chain.hit_rate


def test_what_is_unusual_in_a_scenario_is_named():
    tables = Scenario(0.5, 0.25, verify_table=((1, 1.0), (8, 1.3)), draft_table=((1, 2.0),))
    assert described(tables).endswith("contention 0, verify table of 2 widths up to 8, draft table of 1 width")
    assert described(Scenario(0.5, 0.25)) == "acceptance 0.5, cost ratio 0.25, contention 0, verify slope 0.06"
    unusual = Scenario(0.5, 0.25, draft_slope=0.5, overhead=0.125, second_choice=0.25, spread=8, overconfidence=1)
    assert described(unusual).endswith(
        "verify slope 0.06, draft slope 0.5, overhead 0.125, second choice 0.25, spread 8, overconfidence 1"
    )


# --- several streams ------------------------------------------------------------------------------

STREAMS = ("--streams", "3", "--tokens", "20")


def test_the_table_of_streams_has_a_row_for_each_way_of_decoding_them(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    printed = simulate(capfd, *STREAMS)
    assert " ".join(printed.split()).startswith(
        "acceptance 0.8, cost ratio 0.1, contention 0, verify slope 0.06; 3 streams of 20 tokens, seed 0 "
    )
    lines = printed.splitlines()
    rows = [line.split() for line in lines if "×" in line]
    assert [row[:-6] if row[-1] != "best" else row[:-7] for row in rows] == [
        ["plain", "batches", "–"],
        ["in", "turns", "auto"],
        ["shared", "1"],
        ["shared", "3"],
        ["shared", "auto"],
    ]
    assert sum(row[-1] == "best" for row in rows) == 1
    assert "times as fast as plain batches, and" in " ".join(printed.split())


def test_the_figures_of_streams_are_those_of_the_simulation(capfd):
    found = json.loads(simulate(capfd, *STREAMS, "--json", "--overhead", "1"))
    assert (found["streams"], found["tokens"]) == (3, 20)
    plain, turns, *shared, auto = found["contenders"]
    assert [each["lookahead"] for each in shared] == [1, 3]
    scenario = Scenario(0.8, 0.1, overhead=1.0)
    for contender, result in (
        (plain, simulate_streams(scenario, 3, num_tokens=20, lookahead=0)),
        (turns, simulate_streams(scenario, 3, num_tokens=20, max_batch=1)),
        (auto, simulate_streams(scenario, 3, num_tokens=20)),
    ):
        # A token decoded plainly, for one text alone, takes two units of time.
        assert contender["speed"] == 2 * result.speed
        assert contender["steady_speed"] == 2 * result.steady_speed
        assert contender["longest_wait"] == result.longest_wait / 2
        assert contender["rows_per_pass"] == result.rows_per_pass
    assert found["auto_over_plain_batches"] == auto["steady_speed"] / plain["steady_speed"]
    assert found["auto_over_turns"] == auto["steady_speed"] / turns["steady_speed"]
    speeds = {each["lookahead"]: each["steady_speed"] for each in shared}
    assert found["best_fixed_lookahead"] == max(speeds, key=speeds.get)


def test_the_best_lookahead_of_streams_is_a_fixed_one():
    ways = (("plain batches", 0, 1.0), ("in turns", "auto", 2.0), ("shared", 2, 3.0), ("shared", 4, 2.5))
    rows = [Record(decoding=way, lookahead=k, steady_speed=speed) for way, k, speed in (*ways, ("shared", "auto", 6.0))]
    comparison = StreamsComparison(Scenario(0.8, 0.1), 30, rows, 2)
    assert (comparison.best.lookahead, comparison.over(rows[0]), comparison.over(rows[1])) == (2, 6.0, 3.0)


def test_progress_names_each_run_of_streams():
    seen: list[str] = []
    compare_streams(Scenario(0.8, 0.1), 2, 5, [2], on_progress=seen.append)
    assert seen == [
        "simulating 1 of 4: plain batches",
        "simulating 2 of 4: in turns, lookahead auto",
        "simulating 3 of 4: shared, lookahead 2",
        "simulating 4 of 4: shared, lookahead auto",
    ]


# --- tables of times ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "pairs"),
    [
        ("2,2.1, 3", [[1, 2.0], [2, 2.1], [3, 3.0]]),
        ("1:1,2:1.05, 8:1.3", [[1, 1.0], [2, 1.05], [8, 1.3]]),
        ("12.5", [[1, 12.5]]),
    ],
)
def test_a_table_is_a_list_of_times_or_of_pairs(capfd, given, pairs):
    of_one_token = ("--tokens", "1", "--lookahead", "1")
    found = json.loads(simulate(capfd, "--json", "--verify-table", given, "--draft-table", given, *of_one_token))
    assert found["scenario"]["verify_table"] == found["scenario"]["draft_table"] == pairs


def test_only_the_ratios_of_a_table_matter(capfd):
    one, other = (
        json.loads(simulate(capfd, "--json", "--verify-table", times, "--tokens", "15"))["contenders"]
        for times in ("1,1.5,2", "1:4,2:6,3:8")
    )
    assert one == other


# --- arguments ------------------------------------------------------------------------------------


@sweep(
    ("arguments", "says"),
    [
        (["--acceptance", "1.5"], "acceptance must be a number between 0 and 1, got 1.5"),
        (["--acceptance", "nan"], "acceptance must be a number between 0 and 1, got nan"),
        (["--cost-ratio", "0"], "--cost-ratio must be a finite number above 0, got 0"),
        (["--contention", "-1"], "contention must be a number between 0 and 1, got -1"),
        (["--verify-slope", "inf"], "--verify-slope must be a finite number of at least 0, got inf"),
        (["--acceptance", "high"], "acceptance must be a number between 0 and 1, got 'high'"),
        (["--seed", "-1"], "seed must be a whole number"),
        (["--tokens", "0"], "tokens must be a whole number of at least 1, got 0"),
        (["--lookahead", "1,0"], "lookahead must be whole numbers between 1 and 64, separated by commas, got '1,0'"),
        (["--lookahead", "65"], "lookahead must be whole numbers between 1 and 64"),
        (["--lookahead", ""], "lookahead must be whole numbers between 1 and 64"),
        (["--lookahead", "1,two"], "lookahead must be whole numbers between 1 and 64"),
        (["--streams", "0"], "--streams must be a whole number between 1 and 64, got 0"),
        (["--streams", "65"], "--streams must be a whole number between 1 and 64, got 65"),
        (["--verify-table", "1,two"], "--verify-table must be times of passes over 1, 2, 3, … tokens"),
        (["--verify-table", ""], "or WIDTH:TIME pairs, such as 1:1,2:1.05,8:1.3, got ''"),
        (["--verify-table", "1:1,2"], "got '1:1,2'"),
        (["--verify-table", "1:1:1"], "got '1:1:1'"),
        (["--verify-table", "1:1,2.5:2"], "got '1:1,2.5:2'"),
        (["--verify-table", "2:1,4:2"], "--verify-table must begin with width 1, got 2"),
        (["--verify-table", "1:1,4:2,4:3"], "widths that start at 1 and rise, got (4, 3.0)"),
        (["--verify-table", "1,0"], "a time in --verify-table must be a finite number above 0, got 0.0"),
        (["--draft-table", "1,nan"], "a time in --draft-table must be a finite number above 0, got nan"),
        (
            ["--verify-table", "1,2", "--verify-slope", "0"],
            "--verify-table takes the place of --verify-slope; give one of the two",
        ),
        (["--draft-table", "1,2", "--draft-slope", "0"], "--draft-table takes the place of --draft-slope"),
        (["--plot", "plot.gif"], "plot must be a file that ends in .svg, .png, .pdf, got 'plot.gif'"),
        (["--plot", "nowhere/plot.svg"], "plot 'nowhere/plot.svg' is in no directory that exists; make nowhere first"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_with_its_bound(capfd, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    for compares in ("compare", "compare_streams"):
        monkeypatch.setattr(simulate_command, compares, None)  # nothing is simulated
    assert says in refused(capfd, *arguments)


@pytest.mark.parametrize("arguments", [["--tokens", "1.5"], ["--no-such-option"]])
def test_what_is_no_number_and_no_option_is_refused(capfd, arguments):
    assert arguments[0] in ran(capfd, "simulate", *SCENARIO, *arguments, status=cli.MISUSED).err


@pytest.mark.parametrize("missing", ["--acceptance", "--cost-ratio"])
def test_a_scenario_needs_an_acceptance_and_a_cost_ratio(capfd, missing):
    given = [part for part in (SCENARIO[:2], SCENARIO[2:]) if part[0] != missing]
    assert missing in ran(capfd, "simulate", *given[0], status=cli.MISUSED).err


def test_lookaheads_are_sorted_and_each_is_played_once(capfd):
    rows = table(simulate(capfd, "--lookahead", "3, 1,3"))
    assert [lookahead for decoding, lookahead in rows if decoding == "sequential"] == ["1", "3"]


def test_the_help_names_the_defaults_that_hold(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    printed = ran(capfd, "simulate", "--help-all").out
    for field in attrs.fields(Scenario):
        option = f"--{field.name.replace('_', '-')} "
        if field.name in ("acceptance_changes", "sharding"):
            continue  # only in Python; several options of its own
        (line,) = (line for line in printed.splitlines() if line.strip().startswith(option))
        if field.default is attrs.NOTHING:
            assert "default" not in line
        elif field.default not in (None, ()):
            assert f"(default: {field.default:g})" in line
    assert f"(default: {NUM_TOKENS}, or {STREAM_TOKENS} with --streams)" in printed
    lookaheads, of_streams = (",".join(map(str, each)) for each in (LOOKAHEADS, STREAM_LOOKAHEADS))
    assert f"(default: {lookaheads}, or {of_streams} with --streams)" in printed


# --- the plot -------------------------------------------------------------------------------------


@sweep(
    ("arguments", "figure", "unit"),
    [
        ((), "speed", "tokens per second (plain decoding = 1)"),
        (STREAMS, "steady_speed", "tokens of all streams per second (plain decoding of one = 1)"),
    ],
)
def test_a_plot_has_a_bar_for_each_way_of_decoding(capfd, tmp_path, arguments, figure, unit):
    path = tmp_path / "plot.svg"
    contenders = json.loads(simulate(capfd, "--json", "--plot", str(path), *arguments))["contenders"]
    texts = texts_of(path)
    ways = [each["decoding"] + f", lookahead {each['lookahead']}" * (each["lookahead"] != 0) for each in contenders]
    assert [text for text in texts if text in ways] == ways
    assert set(texts) >= {unit, *(f"{each[figure]:.2f}×" for each in contenders)}
    assert any("acceptance 0.8, cost ratio 0.1" in text for text in texts)


def test_without_matplotlib_a_plot_is_refused_with_the_remedy(capfd, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert table(simulate(capfd))
    monkeypatch.setattr(simulate_command, "compare", None)  # nothing is simulated
    assert 'pip install "outrider[plot]"' in refused(capfd, "--plot", str(tmp_path / "plot.svg"))


def test_a_plot_that_cannot_be_written_is_an_error(capfd, tmp_path):
    (tmp_path / "plot.svg").symlink_to("plot.svg")
    said = refused(capfd, *QUICK, "--plot", str(tmp_path / "plot.svg"), status=cli.FAILED)
    assert "cannot write the plot" in said
    (tmp_path / "folder.svg").mkdir()
    assert "is a directory; name a file in it" in refused(capfd, "--plot", str(tmp_path / "folder.svg"))


# --- output that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_output_that_cannot_be_written_is_an_error(form, monkeypatch, capfd):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert "cannot write to stdout: No space left" in refused(capfd, *QUICK, *form, status=cli.FAILED)
