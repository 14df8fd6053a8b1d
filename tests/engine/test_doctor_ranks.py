"""What the doctor says about ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from protocol.errors import RankError
from protocol.rank_messages import CloseTarget, Describe, Description, Loaded, RankMessage
from runtime.doctor.ranks import examine_ranks, report_on_ranks, take_part_in_examination


def group(rank: int, *received: tuple[int, RankMessage]) -> Any:
    """A group of three, as far as it is used; `sent` has what this rank sends."""
    coming, sent = iter(received), []
    return SimpleNamespace(
        rank=rank, size=3, sent=sent, send=sent.append, receive=lambda: next(coming),
        connect_mlx=lambda: None, run=lambda name, call: call(), fail=RankError,
    )  # fmt: skip


def test_the_report_names_backends_versions_and_ranks() -> None:
    ranks, versions = ({"host": "first"}, {"host": "second"}), {"mlx": "1", "mlx-lm": "2"}
    title, rows = report_on_ranks(ranks, ("ring", "mpi"), "ring", versions)
    assert (title, dict(rows)) == (
        "ranks",
        {
            "backends": "ring (in use), mpi; not in this MLX: nccl, jaccl",
            "versions": "mlx 1, mlx-lm 2; the same on all",
            "rank 0": "first",
            "rank 1": "second",
        },
    )


def test_descriptions_are_listed_by_rank_in_whatever_order_they_come() -> None:
    first = group(0, (2, Description({"host": "c"})), (1, Description({"host": "b"})))
    assert [said for name, said in examine_ranks(first)[1] if name.startswith("rank ")][1:] == ["b", "c"]
    assert first.sent == [Describe()]


def test_a_rank_that_asks_or_answers_something_else_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 was to be asked what it is, and rank 0 sent CloseTarget"):
        take_part_in_examination(group(1, (0, CloseTarget())))
    with pytest.raises(RankError, match="rank 2 was to say what it is, and sent Loaded"):
        examine_ranks(group(0, (2, Loaded({}))))
