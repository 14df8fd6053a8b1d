"""Texts of a target that is sharded over ranks are those of one process, token for token."""

from __future__ import annotations

import pytest
import rank_programs
from ranks import ranks

EVERY_RUN = tuple(rank_programs.RUNS)


def check_texts(size: int, cases: dict[str, tuple[str, ...]]) -> None:
    """Run some families on so many ranks, each drafted, without a drafter, or beside streams that are cancelled."""
    with ranks(rank_programs.equal_texts, size, cases) as (first, *others):
        for name, runs in cases.items():
            for run in runs:
                *which, alone, sharded = first.result()
                assert which == [name, run]
                assert sharded == alone
                assert alone.get("cached", [1]) > [0]
        assert [rank.join() for rank in (first, *others)] == [0] * size


def test_two_ranks_give_the_texts_of_one_process():
    check_texts(2, {"llama": EVERY_RUN, "gpt_oss": ("drafted",), "qwen3_5": ("drafted",)})


@pytest.mark.slow
def test_two_ranks_do_so_for_more_families():
    check_texts(2, {"qwen3": ("drafted",), "deepseek_v3": ("drafted", "plain"), "gpt_oss": ("beside cancelled",)})


@pytest.mark.slow
def test_stages_of_a_pipeline_give_the_texts_of_one_process():
    check_texts(2, {"qwen3_next": ("drafted", "plain")})


@pytest.mark.slow
def test_three_ranks_give_the_texts_of_one_process():
    check_texts(3, {"llama": ("plain",), "deepseek_v3": ("drafted",), "gpt_oss": ("drafted",)})
