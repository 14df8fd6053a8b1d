"""The examination of the ranks: on which machines they run, and what connects them."""

from __future__ import annotations

import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx

from actors.distributed.joining import BACKENDS, available_backends, chosen_backend, versions
from actors.distributed.rank_group import RankGroup
from protocol.errors import RankError
from protocol.rank_messages import Describe, Description
from runtime.loading.device import processor_name
from runtime.ranks.following import breaking
from runtime.terminal.tables import Section

T = TypeVar("T")


def examine_ranks(group: RankGroup | None) -> Section:
    """Examine the ranks, at rank 0, for a report. The others call `take_part_in_examination` meanwhile. This blocks.

    Raises: RankError: a rank has ended, hangs or fails; it is named.
    """
    others = [] if group is None else _connected(group, lambda: _described(group))
    in_use = None if group is None else chosen_backend(group)
    return report_on_ranks([_description(), *others], available_backends(), in_use, versions())


def take_part_in_examination(group: RankGroup) -> None:
    """Describe this rank to rank 0. This blocks. Raises: RankError: a rank has ended, hangs or fails; it is named."""

    def answer() -> None:
        _, asked = group.receive()
        if not isinstance(asked, Describe):
            raise RankError(f"rank {group.rank} was to be asked what it is, and rank 0 sent {type(asked).__name__}")
        group.send(Description(_description()))

    _connected(group, answer)


def _described(group: RankGroup) -> list[dict[str, str]]:
    group.send(Describe())
    answers = {}
    for _ in range(1, group.size):
        rank, answer = group.receive()
        if not isinstance(answer, Description):
            raise RankError(f"rank {rank} was to say what it is, and sent {type(answer).__name__}")
        answers[rank] = answer.of_rank
    return [answers[rank] for rank in range(1, group.size)]


def _connected(group: RankGroup, call: Callable[[], T]) -> T:
    def connect_and_call() -> T:
        with breaking(group, lambda: "examining the ranks"):
            group.connect_mlx()
            return call()

    return group.run("outrider-examination", connect_and_call)


def _description() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "device": mx.default_device().type.name,
        "processor": processor_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "Python": f"Python {platform.python_version()}",
    }


def report_on_ranks(
    descriptions: Sequence[Mapping[str, str]], available: Sequence[str], in_use: str | None, versions: Mapping[str, str]
) -> Section:
    """The section on the ranks, by their descriptions, the backends of `mx.distributed` that MLX has, the one in
    use (None if there is one rank, or MLX does not tell), and the versions that must be the same on all ranks.
    """
    present = [f"{name} (in use)" if name == in_use else name for name in available]
    missing = [name for name in BACKENDS if name not in available]
    is_alone = len(descriptions) == 1
    backends = ", ".join(present or ["none"]) + (f"; not in this MLX: {', '.join(missing)}" if missing else "")
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows = [("backends", backends), ("versions", packages + ("" if is_alone else "; the same on all"))]
    rows += [(f"rank {rank}", ", ".join(each.values())) for rank, each in enumerate(descriptions)]
    if is_alone:
        note = "there is only this rank; mlx.launch starts several, with a hostfile that has at least two hosts"
        rows.append(("note", note))
    return "ranks", rows
