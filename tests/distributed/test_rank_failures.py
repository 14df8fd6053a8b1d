"""A rank that ends, hangs or differs ends all, with an error that names it."""

import os
import re
import signal

import pytest
import rank_programs
from ranks import ranks
from sweeps import sweep

pytestmark = pytest.mark.slow

RANK_1_ENDED = "rank 1 has ended, or cannot be reached any more"


@pytest.mark.parametrize("moment", ["pass", "idle"])
def test_a_rank_that_is_killed_ends_every_stream_with_an_error_that_names_it(moment):
    with ranks(rank_programs.generate_for_ever, 3, moment) as (first, second, third):
        assert [second.result(), third.result()] == ["joined", "joined"]
        assert first.result() == "is there"
        second.process.kill()
        errors = [first.result(), first.result()]
        assert all(error.startswith("the target model failed") and RANK_1_ENDED in error for error in errors)
        assert RANK_1_ENDED in third.result()
        assert [first.join(), third.join()] == [0, 0]


def test_a_rank_that_hangs_ends_every_stream_with_an_error_that_names_it():
    with ranks(rank_programs.generate_for_ever, 2, "prefill") as (first, second):
        assert second.result() == "joined"
        assert first.result() == "is there"
        os.kill(second.process.pid, signal.SIGSTOP)
        assert "rank 1 hangs: it has sent no heartbeat" in first.result()
        assert first.join() == 0
        # Once it goes on, it finds itself alone, and ends as well.
        os.kill(second.process.pid, signal.SIGCONT)
        assert "the ranks cannot go on" in second.result()
        second.join()


def test_a_ctrl_c_at_rank_0_ends_all():
    with ranks(rank_programs.generate_for_ever, 2, "prefill") as (first, second):
        assert second.result() == "joined"
        assert first.result() == "is there"
        os.kill(first.process.pid, signal.SIGINT)
        assert first.result() == "interrupted"
        assert second.result() == "closed"
        assert [first.join(), second.join()] == [0, 0]


def test_ranks_end_when_rank_0_is_killed():
    with ranks(rank_programs.generate_for_ever, 2, "prefill") as (first, second):
        assert second.result() == "joined"
        assert first.result() == "is there"
        first.process.kill()
        assert "rank 0 has ended, or cannot be reached any more" in second.result()
        assert second.join() == 0


def test_a_rank_that_ends_before_the_runtime_is_open_ends_it():
    with ranks(rank_programs.open_and_end, 2, "ends") as (first, _):
        assert RANK_1_ENDED in first.result()


@sweep(
    ("how", "expected"),
    [
        ("other model", "rank 1 has loaded another model or stage than rank 0: its "),
        ("out of step", r"rank 1 is out of step before \w+: its sequence \d+ holds \d+ tokens .*, rank 0's \d+"),
        ("fails", "rank 1 failed in feed: ValueError: no such kernel"),
        ("different stages", "its kinds of caches: ArraysCache there, KVCache here"),
        ("no shards", "mlx_lm.models.gemma2 can neither be sharded nor run as a pipeline; run it on one rank"),
        ("waits", r"a pass of rank 0 has not ended: the ranks wait for each other \(rank 1 is in \w+, for \d+ s\)"),
    ],
)
def test_a_rank_that_differs_or_fails_ends_all_and_is_named(how, expected):
    with ranks(rank_programs.open_and_end, 2, how) as (first, second):
        assert re.search(expected, first.result())
        assert re.search(expected, second.result())
        if how in ("other model", "out of step", "fails"):
            assert [first.join(), second.join()] == [0, 0]


def test_tokens_of_a_failed_collective_are_not_read_as_addresses():
    # A crash would end a process before it gives anything.
    with ranks(rank_programs.open_and_end, 2, "unwritten tokens") as (first, second):
        assert [first.result(), second.result()] == ["no error", "no error"]
        assert [first.join(), second.join()] == [0, 0]


def test_a_rank_with_another_version_is_named():
    with ranks(rank_programs.join_with_another_version, 2) as (first, second):
        expected = "rank 1 has mlx 0.1, rank 0 has "
        assert expected in first.result()
        assert expected in second.result()


def test_a_rank_that_never_starts_is_named():
    # In that time rank 1 has come, however busy the machine is.
    with ranks(rank_programs.join_for, 3, 5.0, start=lambda rank: rank < 2) as (first, second, _):
        expected = "rank 2 of 3 has not come within 5 s"
        assert expected in first.result()
        assert expected in second.result()


def test_a_rank_0_that_never_starts_is_named():
    with ranks(rank_programs.join_for, 2, 0.3, start=lambda rank: rank == 1) as (_, second):
        assert "cannot be reached within 0.3 s" in second.result()


def test_a_rank_that_starts_late_is_waited_for():
    with ranks(rank_programs.join_for, 2, 60.0, start=lambda rank: rank == 0) as (first, second):
        second.process.start()
        assert [first.result(), second.result()] == ["joined", "joined"]
