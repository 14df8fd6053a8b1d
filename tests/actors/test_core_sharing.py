"""How the models' threads share the cores."""

import threading

import attrs
import pytest
import trio
from sweeps import sweep

from actors.workers import thread_worker
from actors.workers.core_sharing import ALONE_AFTER_S, CoreSharing
from actors.workers.thread_worker import ThreadWorker
from actors.workers.worker import Job


@attrs.define
class Machine:
    """A BLAS whose number of threads is recorded, and a clock."""

    num_cores: int
    now_s: float = 100.0
    set_to: list[int] = attrs.field(factory=list)

    def sharing(self) -> CoreSharing:
        sharing = CoreSharing(lambda: self.now_s)
        sharing.control(self.set_to.append, self.num_cores)
        return sharing


@sweep("num_cores, set_to", [(1, [1]), (2, [2, 1]), (3, [3, 1]), (4, [4, 2, 1]), (9, [9, 4, 3])])
def test_models_that_compute_at_once_share_the_cores_evenly(num_cores: int, set_to: list[int]) -> None:
    machine = Machine(num_cores)
    sharing = machine.sharing()
    with sharing.computing(), sharing.computing(), sharing.computing():
        assert machine.set_to == set_to


def test_all_cores_come_back_only_after_a_model_was_alone_for_a_while() -> None:
    machine = Machine(4)
    sharing = machine.sharing()
    for _ in range(3):  # rounds of speculation
        with sharing.computing():
            machine.now_s += 0.01
            with sharing.computing():
                machine.now_s += 0.01
    assert machine.set_to == [4, 2]
    machine.now_s += ALONE_AFTER_S
    with sharing.computing():
        assert machine.set_to == [4, 2]
    machine.now_s += 0.001
    with sharing.computing():
        assert machine.set_to == [4, 2, 4]


def test_all_cores_come_back_in_the_middle_of_a_long_pass() -> None:
    machine = Machine(4)
    sharing = machine.sharing()
    with sharing.computing():
        with sharing.computing():
            sharing.update()
        machine.now_s += ALONE_AFTER_S
        sharing.update()
        assert machine.set_to == [4, 2]
        machine.now_s += 0.001
        sharing.update()
        assert machine.set_to == [4, 2, 4]


def test_a_job_that_raises_has_ended() -> None:
    machine = Machine(2)
    sharing = machine.sharing()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), sharing.computing():
            _ = 1 // 0
    with sharing.computing():
        assert machine.set_to == [2]


def test_where_no_number_can_be_set_nothing_is_held() -> None:
    sharing = CoreSharing()
    with sharing.computing(), sharing.computing():
        assert sharing.hold_s == 0.0
    assert Machine(1).sharing().hold_s == 0.0
    assert Machine(2).sharing().hold_s == ALONE_AFTER_S


@sweep("kinds, set_to", [(("verify", "draft"), [2, 1]), (("prefill", "open"), [2])])
async def test_jobs_of_two_workers_at_once_share_the_cores_if_both_run_models(kinds, set_to, monkeypatch):
    machine = Machine(2)
    monkeypatch.setattr(thread_worker, "CORES", machine.sharing())
    both = threading.Barrier(2)
    async with ThreadWorker("target") as target, ThreadWorker("draft") as draft:
        await target.run(Job("verify", lambda: None))
        assert machine.set_to == [2]
        async with trio.open_nursery() as nursery:
            for worker, kind in zip((target, draft), kinds, strict=True):
                nursery.start_soon(worker.run, Job(kind, both.wait))
        assert machine.set_to == set_to
