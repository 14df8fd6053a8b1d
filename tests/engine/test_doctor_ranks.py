"""What the doctor makes of measurements of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from actors.distributed.exchange import Exchange
from actors.distributed.links import LARGE_BYTES, Links, SmallAndLarge, Times
from runtime.doctor.ranks import ExaminedRanks, plan, report_on_ranks
from runtime.doctor.report import ExaminedModel
from runtime.measuring.figures import spread
from runtime.measuring.pass_times import Passes

# In a ring of two, an all-reduce of few bytes has two steps, of 100 µs each; one of many sends them once, at 8 Gbit/s.
ALL_SUM = SmallAndLarge(Times(200e-6, 150e-6, 300e-6), Times(200e-6 + LARGE_BYTES / 1e9, 0.004, 0.005))
# Half of a round trip is one way, and the large array goes one way alone.
LINK = SmallAndLarge(Times(160e-6, 140e-6, 180e-6), Times(80e-6 + LARGE_BYTES / 1e9, 0.004, 0.005))
RANKS = ExaminedRanks(
    backends=("ring", "mpi"),
    backend="ring",
    versions={"mlx": "1", "mlx-lm": "2"},
    description={"host": "first"},
    links=Links(({"host": "first"}, {"host": "second"}), (Times(0.0002, 0.0001, 0.0003),), ALL_SUM, (LINK, LINK)),
)


def passes(seconds: dict[int, float]) -> Passes:
    return Passes({width: spread([each]) for width, each in seconds.items()})


def diagnosis(collectives: dict[str, int], draft: Any) -> Any:
    exchange = {
        width: Exchange(collectives, 56 * 2 * 1024 * width, (0.001, seconds, 1.0))
        for width, seconds in ((1, 0.004), (9, 0.006))
    }
    anatomy: Any = None
    target = ExaminedModel(anatomy, passes({1: 0.010, 9: 0.020}), exchange, 2)
    return SimpleNamespace(target=target, draft=draft)


def test_the_plan_has_the_pass_of_one_machine_and_the_links_that_were_measured() -> None:
    draft = SimpleNamespace(passes=passes({1: 0.0006}))
    assert plan(RANKS, diagnosis({"all_sum": 56}, draft)) == (
        "outrider simulate --ranks 1,2,4 --acceptance 0.7 --cost-ratio 0.05 --pass-time 12 --verify-table 1:12,9:28 "
        "--layers 28 --hidden-size 1024 --all-reduce ring --link-latency 100 --link-bandwidth 8"
    )
    without_draft = plan(RANKS, diagnosis({"all_sum": 56}, None))
    assert without_draft is not None
    assert "--cost-ratio 0.1 " in without_draft


@pytest.mark.parametrize("collectives", [{"send": 1, "all_gather": 1}, {"all_sum": 56, "all_gather": 1}, {}])
def test_there_is_no_plan_of_what_the_simulator_does_not_know(collectives: dict[str, int]) -> None:
    assert plan(RANKS, diagnosis(collectives, None)) is None
    assert plan(attrs.evolve(RANKS, links=None), diagnosis({"all_sum": 56}, None)) is None


def test_slow_links_are_figures_that_simulate_reads() -> None:
    slow = attrs.evolve(ALL_SUM, small=Times(0.5, 0.5, 0.5), large=Times(100.5, 100.5, 100.5))
    (_, links) = report_on_ranks(attrs.evolve(RANKS, links=attrs.evolve(RANKS.links, all_sum=slow)))
    assert dict(links[1])["to plan with"].endswith("--link-latency 250000 --link-bandwidth 0.000336")


def test_the_report_names_ranks_and_links() -> None:
    assert [(title, dict(rows)) for title, rows in report_on_ranks(RANKS)] == [
        (
            "ranks",
            {
                "backends": "ring (in use), mpi; not in this MLX: nccl, jaccl",
                "versions": "mlx 1, mlx-lm 2; the same on all",
                "rank 0": "first",
                "rank 1": "second",
            },
        ),
        (
            "links",
            {
                "control, rank 1": "an announcement and its answer take 0.20 ms (0.10–0.30)",
                "all_sum of 4 bytes": "0.20 ms (0.15–0.30)",
                "all_sum of 4.2 MB": "4.39 ms (4.00–5.00), 7.64 Gbit/s",
                "rank 0 to rank 1": "0.08 ms (0.07–0.09) one way for a small message, 8 Gbit/s for 4.2 MB",
                "rank 1 to rank 0": "0.08 ms (0.07–0.09) one way for a small message, 8 Gbit/s for 4.2 MB",
                "to plan with": "outrider simulate … --all-reduce ring --link-latency 100 --link-bandwidth 8",
            },
        ),
    ]


@pytest.mark.parametrize(
    ("backend", "expected"), [("jaccl", "mesh --link-latency 200"), ("nccl", "tree --link-latency 100")]
)
def test_each_backend_is_planned_as_what_it_is_closest_to(backend: str, expected: str) -> None:
    (_, links) = report_on_ranks(attrs.evolve(RANKS, backend=backend))
    assert f"--all-reduce {expected}" in dict(links[1])["to plan with"]
