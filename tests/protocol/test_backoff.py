"""Backoff: what fails again and again is tried less and less often."""

from __future__ import annotations

import sys

from protocol.backoff import FIRST_JOBS_LIMITED, Backoff, SharingLimit


def test_it_is_left_out_twice_as_often_after_each_failure() -> None:
    backoff, tried = Backoff(), []
    for turn in range(20):
        if not backoff.leaves_out():
            tried.append(turn)
            backoff.fail()
    assert tried == [0, 2, 5, 10, 19]


def test_after_too_many_half_of_them_share_for_some_jobs() -> None:
    limit = SharingLimit()
    for num_limited in (FIRST_JOBS_LIMITED, 2 * FIRST_JOBS_LIMITED):
        assert limit.value == sys.maxsize
        limit.halve(12)
        for _ in range(num_limited):
            assert limit.value == 6
            limit.count_job()
        assert limit.value == 6
        limit.count_job()
    limit.halve(1)
    assert limit.value == 1
