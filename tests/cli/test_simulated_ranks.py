"""`outrider simulate --ranks`: a target over several machines."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import attrs
import pytest
from command_line import ran
from sweeps import sweep

from runtime.cli import main as cli
from runtime.simulation.comparison import compare, compare_ranks
from runtime.simulation.scenario import Scenario
from runtime.simulation.sharding import ALL_REDUCES, SHAPES, Sharding, links_of

ROOT = Path(__file__).parents[2]

# 1000 all-reduces in a pass; 2000 bytes and so 16,000 bits a row, which are 16 µs at a gigabit a second.
ROUND = Sharding(
    ranks=4, pass_time=100.0, layers=500, hidden_size=1000, link_latency=10.0, link_bandwidth=1.0, all_reduce="ring"
)


def ring_us(sharding: Sharding, rows: int) -> float:
    """Microseconds of an all-reduce in a ring, step by step: each rank sends a part to the next one and waits for one.

    Parts are added up on their way around, and the sums go around once more.
    """
    part_us = rows * sharding.hidden_size * 16 / (sharding.link_bandwidth * 1000) / sharding.ranks
    clocks = [0.0] * sharding.ranks
    for _ in range(2):
        for _ in range(sharding.ranks - 1):
            clocks = [max(clocks[i], clocks[i - 1] + sharding.link_latency + part_us) for i in range(sharding.ranks)]
    return max(clocks)


@sweep("rows", [1, 8])
@sweep("ranks", [1, 2, 3, 4, 64])
def test_an_exchange_takes_what_its_messages_take(ranks: int, rows: int) -> None:
    ring = attrs.evolve(ROUND, ranks=ranks)
    assert ring.exchange_ms(rows) == pytest.approx(ring_us(ring, rows))  # a thousand of them, in milliseconds
    if ranks > 1:
        mesh, tree = (attrs.evolve(ring, all_reduce=kind) for kind in ("mesh", "tree"))
        assert mesh.exchange_ms(rows) == pytest.approx(10 + 16 * rows)
        depth = {2: 1, 3: 2, 4: 2, 64: 6}[ranks]
        assert tree.exchange_ms(rows) == pytest.approx(2 * depth * 10 + 2 * 16 * rows)


@sweep("kind", ALL_REDUCES)
@sweep("ranks", [2, 5])
def test_links_are_those_with_which_measured_times_come_out(kind: str, ranks: int) -> None:
    sharding = attrs.evolve(ROUND, ranks=ranks, all_reduce=kind, layers=500, hidden_size=1)
    small, large = (attrs.evolve(sharding, hidden_size=size).exchange_ms(1) / 1e6 for size in (1, 2**20))
    assert links_of(kind, ranks, small, large, 2**21) == pytest.approx((10.0, 1.0), rel=0.01)


def test_links_as_fast_as_memory_have_a_bandwidth_all_the_same() -> None:
    assert links_of("ring", 2, 0.002, 0.001, 1000) == (1000.0, pytest.approx(0.08))


@sweep("kind", ALL_REDUCES)
def test_the_computation_is_divided_and_the_exchange_is_not(kind: str) -> None:
    for ranks in (2, 16):
        sharding = attrs.evolve(ROUND, ranks=ranks, all_reduce=kind)
        scenario = Scenario(0.8, 0.1, verify_slope=0.06, sharding=sharding)
        for rows in (1, 5):
            alone_ms = 100.0 * (1 + 0.06 * (rows - 1))
            assert scenario.verify_seconds(rows) * 100.0 == pytest.approx(alone_ms / ranks + sharding.exchange_ms(rows))


def test_with_links_that_cost_nothing_only_the_draft_is_relatively_dearer() -> None:
    free = attrs.evolve(ROUND, link_latency=0.0, link_bandwidth=1e12)
    sharded = compare(Scenario(0.8, 0.1, sharding=free), 30, [2])
    alone = compare(Scenario(0.8, 0.4), 30, [2])
    assert [row.speed for row in sharded.rows] == pytest.approx([row.speed for row in alone.rows])
    # 100 ms over four ranks.
    assert sharded.rows[0].tokens_per_second == pytest.approx(40.0)
    assert alone.rows[0].tokens_per_second is None


def test_speculation_gains_more_where_links_are_slow_to_begin() -> None:
    scenario = Scenario(0.8, 0.1, sharding=attrs.evolve(ROUND, link_bandwidth=100.0))
    slower = attrs.evolve(scenario, sharding=attrs.evolve(scenario.sharding, link_latency=50.0))
    gains = [compare(one, 60, [3]).of("tree")[0].speed for one in (scenario, slower)]
    assert gains[1] > 1.15 * gains[0]


@pytest.mark.slow
def test_numbers_of_ranks_are_compared_as_each_is_alone() -> None:
    scenario = Scenario(0.8, 0.1, sharding=ROUND)
    both = compare_ranks(scenario, [1, 4], 20, [3])
    assert [row.ranks for row in both.rows] == [1, 4]
    assert both.rows[1] == compare_ranks(scenario, [4], 20, [3]).rows[0]
    assert both.comparisons[1] == compare(scenario, 20, [3])
    assert both.rows[0].pass_ms == 100.0
    assert both.comparisons[0].rows[0].speed == 1.0


@pytest.mark.slow
def test_the_table_of_the_guide_is_what_its_command_prints(monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    page = (ROOT / "docs" / "planning-several-machines.md").read_text(encoding="utf-8")
    command, table = re.findall(r"```(?:sh|text)\n(.*?)```", page, re.DOTALL)[:2]
    # Two of its rows; each number of ranks is simulated on its own.
    assert cli.main([*shlex.split(command)[1:], "--ranks", "4,64"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()[-3:-1]]
    assert [row[0] for row in rows] == ["4", "64"]
    assert [line.split() for line in table.splitlines() if line.split()[0] in ("4", "64")] == rows


# --- the command ----------------------------------------------------------------------------------

QUICK = ("simulate", "--acceptance", "0.8", "--cost-ratio", "0.1", "--tokens", "20", "--lookahead", "3")
LINKS = ("--pass-time", "100", "--link-latency", "10", "--link-bandwidth", "1")
SHARDED = (*LINKS, "--layers", "500", "--hidden-size", "1000")


def said(capfd: Any, *arguments: str, status: int = 0) -> str:
    out, err = ran(capfd, *QUICK, *arguments, status=status)
    return str(err if status else out)


def test_one_number_of_ranks_has_the_usual_table_with_tokens_per_second(capfd: Any) -> None:
    printed = said(capfd, *SHARDED, "--ranks", "4")
    assert "ranks 4, ring of links with 10 µs and 1 Gbit/s, 500 layers of 1000, T_v(1) 100 ms" in printed
    # 25 ms, six steps of 10 ms in all, and three halves of 16 ms.
    plain = next(line.split() for line in printed.splitlines() if line.startswith("plain"))
    assert plain[:4] == ["plain", "–", "1.00×", f"{1000 / (25 + 60 + 24):.1f}"]


def test_several_have_a_row_each(capfd: Any) -> None:
    arguments = (*LINKS, "--shape", "llama-70b", "--ranks", "1,8", "--all-reduce", "mesh")
    lines = said(capfd, *arguments).splitlines()
    assert "ranks 1,8, mesh of links" in lines[0]
    assert f"{SHAPES['llama-70b'][0]} layers of {SHAPES['llama-70b'][1]}" in lines[0]
    rows = [line.split() for line in lines if line.split()[0] in ("1", "8")]
    assert [row[0] for row in rows] == ["1", "8"]
    assert rows[0][1:5] == ["100.0", "ms", "0.0", "ms"]
    found = json.loads(said(capfd, *arguments, "--json"))["ranks"]
    assert [row["ranks"] for row in found] == [1, 8]
    assert rows[1][1] == f"{found[1]['pass_ms']:.1f}"
    assert rows[1][3] == f"{found[1]['exchange_ms']:.1f}"
    assert float(rows[1][-2]) == pytest.approx(found[1]["contenders"][-1]["tokens_per_second"], abs=0.05)


def test_several_streams_share_the_links(capfd: Any) -> None:
    found = json.loads(said(capfd, *SHARDED, "--ranks", "4", "--streams", "2", "--json"))
    assert found["scenario"]["sharding"]["ranks"] == 4


@sweep(
    ("arguments", "complaint"),
    [
        (("--ranks", "0", *SHARDED), "--ranks must be whole numbers between 1 and 1024, separated by commas, got '0'"),
        (("--ranks", "2,x", *SHARDED), "--ranks must be whole numbers between 1 and 1024"),
        (
            ("--ranks", "2"),
            "--ranks needs --pass-time, --link-latency, --link-bandwidth, --layers, --hidden-size, too;",
        ),
        (("--ranks", "2", *LINKS, "--layers", "3"), "--ranks needs --hidden-size, too"),
        (("--link-latency", "3"), "--link-latency is about a target over several machines; say over how many"),
        (("--shape", "llama-8b"), "--shape is about a target over several machines"),
        (("--ranks", "2", *SHARDED, "--shape", "llama-8b"), "leave out --layers and --hidden-size"),
        (("--ranks", "2", *SHARDED, "--all-reduce", "star"), "--all-reduce must be ring, mesh or tree, got 'star'"),
        (("--ranks", "2", *SHARDED, "--link-bandwidth", "0"), "--link-bandwidth must be"),
        (("--ranks", "2,4", *SHARDED, "--streams", "2"), "--ranks must be one number with --streams, got 2"),
        (("--ranks", "2,4", *SHARDED, "--plot", "a.svg"), "--ranks must be one number with --plot, got 2"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], complaint: str, capfd: Any) -> None:
    assert complaint in said(capfd, *arguments, status=cli.MISUSED)
