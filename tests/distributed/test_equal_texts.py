"""Texts of a target that is sharded over ranks are those of one process, token for token."""

import pytest
import rank_programs
from ranks import ranks


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, {"llama": ("drafted", "beside cancelled")}),
        pytest.param(2, {"qwen3_5": ("drafted",)}, marks=pytest.mark.slow),
        pytest.param(2, {"deepseek_v3": ("plain",), "qwen3_next": ("drafted",)}, marks=pytest.mark.slow),
        pytest.param(3, {"gpt_oss": ("drafted",)}, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_texts_of_one_process(size: int, cases: dict[str, tuple[str, ...]]) -> None:
    """Each family runs drafted, without a drafter, or beside streams that are cancelled."""
    with ranks(rank_programs.equal_texts, size, cases) as (first, *others):
        for name, runs in cases.items():
            for run in runs:
                *which, alone, sharded = first.result()
                assert which == [name, run]
                assert sharded == alone
                assert alone.get("cached", [1]) > [0]
        assert [rank.join() for rank in (first, *others)] == [0] * size
