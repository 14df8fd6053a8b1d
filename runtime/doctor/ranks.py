"""The examination of the ranks: what they are, and how long messages and collectives between them take."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Iterator
from typing import TypeVar

import attrs
import mlx.core as mx

from actors.distributed.joining import versions
from actors.distributed.links import (
    BACKENDS,
    LARGE_BYTES,
    SMALL_BYTES,
    Links,
    SmallAndLarge,
    Times,
    available_backends,
    chosen_backend,
    measure_links,
    take_part,
)
from actors.distributed.rank_group import RankGroup
from runtime.doctor.conclusion import USUAL_ACCEPTANCE
from runtime.doctor.report import Diagnosis
from runtime.loading.device import processor_name
from runtime.ranks.following import breaking
from runtime.simulation.sharding import links_of

T = TypeVar("T")

# Ranks that are out of step in spite of all checks wait for each other forever. So measuring the links counts as
# hanging after this many seconds; with slow links it takes a tenth of that.
LIMIT_S = 300.0

# The `--all-reduce` of `outrider simulate` that is closest to what each backend of MLX does.
_ALL_REDUCES = {"ring": "ring", "jaccl": "mesh", "nccl": "tree", "mpi": "tree"}
# The `--cost-ratio` to plan with where there is no draft model.
_USUAL_COST_RATIO = 0.1


@attrs.frozen
class ExaminedRanks:
    """What was found about the ranks."""

    backends: tuple[str, ...]  # those of `mx.distributed` that MLX has here
    backend: str | None  # the one in use; None if there is one rank, or MLX does not tell
    versions: dict[str, str]  # of the packages that must be the same on all ranks, by name
    description: dict[str, str]  # of this rank, by name
    links: Links | None  # what was measured between the ranks; None if there is one


def examine_ranks(group: RankGroup | None) -> ExaminedRanks:
    """Examine the ranks, at rank 0. The others call `take_part_in_examination` meanwhile. This blocks.

    Args:
        group: from `join_ranks`; None for a process on its own.

    Raises: RankError: a rank has ended, hangs or fails; it is named.
    """
    own = _description()
    if group is None:
        return ExaminedRanks(available_backends(), None, versions(), own, None)
    links = _connected(group, lambda: measure_links(group, own), LIMIT_S)
    return ExaminedRanks(available_backends(), chosen_backend(group), versions(), own, links)


def take_part_in_examination(group: RankGroup) -> None:
    """Take part in what rank 0 examines, until it has finished. This blocks.

    Raises: RankError: a rank has ended, hangs or fails; it is named.
    """
    _connected(group, lambda: take_part(group, _description()))


def _connected(group: RankGroup, call: Callable[[], T], limit_s: float | None = None) -> T:
    def connect_and_call() -> T:
        with breaking(group, lambda: "measuring the links"):
            group.connect_mlx()
            return call()

    return group.run("outrider-links", connect_and_call, limit_s)


def _description() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "device": mx.default_device().type.name,
        "processor": processor_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": f"Python {platform.python_version()}",
    }


# --- the report -----------------------------------------------------------------------------------


def report_on_ranks(found: ExaminedRanks) -> list[tuple[str, list[tuple[str, str]]]]:
    """The sections on the ranks, each a title and rows of (name, finding)."""
    sections = [("ranks", list(_ranks(found)))]
    if found.links is not None:
        sections.append(("links", list(_links(found, found.links))))
    return sections


def plan(found: ExaminedRanks, diagnosis: Diagnosis) -> str | None:
    """The command that says how fast the target would be on other numbers of ranks, with the measured links.

    Returns: None for one rank, or for a target that is not tensor parallel: the simulator knows no other.
    """
    exchange, exchanged, links = diagnosis.target.exchange, diagnosis.target.exchange_seconds, found.links
    if links is None or exchange is None or exchanged is None or set(exchange[1].collectives) != {"all_sum"}:
        return None
    num_ranks, num_sums = len(links.descriptions), exchange[1].collectives["all_sum"]
    alone = {
        # At least a tenth: a rank may wait less for the others in a pass than in an exchange that is timed alone.
        width: num_ranks * max(seconds - exchanged[width], seconds / 10)
        for width, seconds in diagnosis.target.passes.seconds.items()
    }
    draft = diagnosis.draft
    cost_ratio = _USUAL_COST_RATIO if draft is None else draft.passes.seconds[1] / alone[1]
    numbers = sorted({max(1, num_ranks // 2), num_ranks, 2 * num_ranks})
    table = ",".join(f"{width}:{_figure(seconds * 1e3)}" for width, seconds in alone.items())
    return (
        f"outrider simulate --ranks {','.join(map(str, numbers))} --acceptance {USUAL_ACCEPTANCE:g} "
        f"--cost-ratio {_figure(cost_ratio)} --pass-time {_figure(alone[1] * 1e3)} --verify-table {table} "
        # The simulator assumes two all-reduces a layer, of hidden states with two bytes a number.
        f"--layers {max(1, num_sums // 2)} --hidden-size {max(1, exchange[1].num_bytes // num_sums // 2)} "
        f"{_link_flags(found, links)}"
    )


def _ranks(found: ExaminedRanks) -> Iterator[tuple[str, str]]:
    present = [f"{name} (in use)" if name == found.backend else name for name in found.backends]
    missing = [name for name in BACKENDS if name not in found.backends]
    yield "backends", ", ".join(present or ["none"]) + (f"; not in this MLX: {', '.join(missing)}" if missing else "")
    of_all = "" if found.links is None else "; the same on all"
    yield "versions", ", ".join(f"{name} {version}" for name, version in found.versions.items()) + of_all
    for rank, description in enumerate([found.description] if found.links is None else found.links.descriptions):
        yield f"rank {rank}", ", ".join(description.values())
    if found.links is None:
        yield "note", "there is only this rank; mlx.launch starts several, with a hostfile that has at least two hosts"


def _links(found: ExaminedRanks, links: Links) -> Iterator[tuple[str, str]]:
    for rank, times in enumerate(links.control, start=1):
        yield f"control, rank {rank}", f"an announcement and its answer take {_milliseconds(times)}"
    small, large = links.all_sum.small, links.all_sum.large
    yield f"all_sum of {SMALL_BYTES} bytes", _milliseconds(small)
    rate = _gigabits(LARGE_BYTES, large.median)
    yield f"all_sum of {LARGE_BYTES / 1e6:.1f} MB", f"{_milliseconds(large)}, {_figure(rate)} Gbit/s"
    for rank, link in enumerate(links.links):
        yield f"rank {rank} to rank {(rank + 1) % len(links.links)}", _link(link)
    yield "to plan with", f"outrider simulate … {_link_flags(found, links)}"


def _link(link: SmallAndLarge) -> str:
    # The measured time includes a receipt that goes back.
    one_way = Times(*(seconds / 2 for seconds in attrs.astuple(link.small)))
    sending = max(link.large.median - one_way.median, link.large.median / 10)
    return (
        f"{_milliseconds(one_way)} one way for a small message, "
        f"{_figure(_gigabits(LARGE_BYTES, sending))} Gbit/s for {LARGE_BYTES / 1e6:.1f} MB"
    )


def _link_flags(found: ExaminedRanks, links: Links) -> str:
    all_reduce = _ALL_REDUCES.get(found.backend or "", "ring")
    times = links.all_sum.small.median, links.all_sum.large.median
    latency, bandwidth = links_of(all_reduce, len(links.descriptions), *times, LARGE_BYTES)
    return f"--all-reduce {all_reduce} --link-latency {_figure(latency)} --link-bandwidth {_figure(bandwidth)}"


def _milliseconds(times: Times) -> str:
    return f"{times.median * 1e3:.2f} ms ({times.fastest * 1e3:.2f}–{times.slowest * 1e3:.2f})"


def _gigabits(num_bytes: int, seconds: float) -> float:
    return num_bytes * 8 / seconds / 1e9


def _figure(value: float) -> str:
    """A number with three significant digits, and always all those before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
