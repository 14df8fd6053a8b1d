"""A drafter on a rank of its own: texts are those of one process, and the drafter's end costs none."""

import os
import signal
from typing import Any

import pytest
import rank_programs
from ranks import ranks
from sweeps import sweep

from actors.distributed import rank_address
from actors.distributed.rank_address import left_out
from actors.distributed.rank_group import RankGroup
from protocol.errors import SettingsError
from runtime.ranks.leading import check_group


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("model", 3), ("eagle3", 2)])
def test_texts_are_those_of_one_process(kind: str, size: int) -> None:
    """With three ranks, the first two share the target."""
    with ranks(rank_programs.equal_texts_drafted_elsewhere, size, kind) as started:
        alone, drafted_elsewhere, num_accepted = started[0].result()
        assert drafted_elsewhere == alone
        assert num_accepted > 0
        assert [rank.join() for rank in started] == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_is_lost_in_mid_stream_costs_no_token(end: signal.Signals) -> None:
    with ranks(rank_programs.lose_the_drafter, 2) as (first, second):
        assert second.result() == "joined"
        expected = first.result()
        assert first.result() > 0  # drafted tokens were accepted
        os.kill(second.process.pid, end)
        assert first.result() == expected
        assert first.result() == 1  # session that was drafted for
        assert first.result() == expected
        assert first.result() is False  # health of the drafter
        assert first.result() > 0  # another drafter, at rank 0
        how = "has ended, or cannot be reached any more" if end == signal.SIGKILL else "hangs: it has sent no heartbeat"
        assert f"rank 1 {how}" in first.result()
        assert first.join() == 0


def test_a_rank_that_cannot_load_the_drafter_says_why_and_may_be_asked_again() -> None:
    with ranks(rank_programs.open_without_its_draft, 2) as (first, second):
        expected = "rank 1 cannot load the drafter: it was given none by name; call follow(target, group, draft)"
        assert first.result() == expected
        assert first.result() > 0
        assert [first.join(), second.join()] == [0, 0]


# --- options --------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Any:
    """Rank 0's group of three, which nobody else is in."""
    group = RankGroup(0, 3, {})
    yield group
    group.fail("the test is over")
    group._thread.join(30)


NEEDED = "draft_rank must be a whole number between 0 and 2, got"
UNNAMED = "draft_rank=1 is where a draft model is loaded, and none is named"


@sweep(
    ("draft", "draft_rank", "expected"),
    [
        ("owner/draft", 3, f"{NEEDED} 3"),
        ("owner/draft", -1, f"{NEEDED} -1"),
        ("owner/draft", True, f"{NEEDED} True"),
        ("owner/draft", 1, "draft_rank=1 leaves several ranks to the target, and only MLX's ring can connect them"),
        (None, 1, UNNAMED),
        ("auto", 1, UNNAMED),
    ],
)
def test_a_rank_that_cannot_draft_is_refused(group, monkeypatch, draft, draft_rank, expected):
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    with pytest.raises(SettingsError, match=expected):
        check_group(group, "owner/name", draft, draft_rank=draft_rank)


def test_a_rank_without_a_group_is_refused() -> None:
    with pytest.raises(SettingsError, match="draft_rank is one of several ranks, and there is no group of them"):
        check_group(None, "owner/name", "owner/draft", draft_rank=1)


def test_rank_0_may_be_named(group: Any) -> None:
    check_group(group, "owner/name", None, draft_rank=0)


@sweep("before, draft_rank, given", [(None, 1, 1), (1, None, None), (1, 0, None)])
def test_ranks_that_are_connected_stay_so(group, monkeypatch, before, draft_rank, given):
    monkeypatch.setattr(rank_address, "_hosts", lambda _: [["a:1"], ["b:1"], ["c:1"]])
    group.mlx, group._mlx_without = object(), before
    expected = f"the ranks were connected with draft_rank={before}, .* got draft_rank={given}"
    with pytest.raises(SettingsError, match=expected):
        check_group(group, "owner/name", "owner/draft", draft_rank=draft_rank)


def test_a_ring_is_described_without_the_rank_that_drafts(tmp_path: Any, monkeypatch: Any) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text('[["a:1"], ["b:1"], ["c:1"]]')
    monkeypatch.setenv("MLX_HOSTFILE", str(hosts))
    for own, expected in (("0", 0), ("2", 1)):
        monkeypatch.setenv("MLX_RANK", own)
        with left_out(1):
            assert rank_address._hosts(os.environ) == [["a:1"], ["c:1"]]
            assert int(os.environ["MLX_RANK"]) == expected
        assert os.environ["MLX_RANK"] == own
        assert os.environ["MLX_HOSTFILE"] == str(hosts)
