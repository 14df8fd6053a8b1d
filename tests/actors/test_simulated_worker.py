"""Workers in simulated time: the duration of a job, alone and beside another on a shared device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from actors.workers.simulated_worker import Contention, SimulatedWorker
from actors.workers.worker import Job, JobError, Step, Steps
from protocol.errors import SettingsError
from protocol.trace import Actor, Event, Span, SpanKind


@attrs.define
class Device:
    """Two workers on one device, and the times of their jobs."""

    target: SimulatedWorker
    draft: SimulatedWorker
    spans: list[Span]

    def times(self, actor: Actor) -> list[tuple[float, float]]:
        """When each job of an actor began and ended, in seconds since the start of the test."""
        return [(span.began, span.ended) for span in self.spans if span.actor == actor]


def device(kappa: float | None) -> Device:
    """Two workers; a job takes `num_tokens` seconds, a draft a quarter of that."""
    spans: list[Span] = []

    def note(event: Event) -> None:
        assert isinstance(event, Span)
        spans.append(event)

    contention = None if kappa is None else Contention(kappa)
    target = SimulatedWorker("target", lambda job: float(job.num_tokens), note, contention)
    draft = SimulatedWorker("draft", lambda job: job.num_tokens / 4, note, contention)
    return Device(target, draft, spans)


def job(kind: SpanKind, num_tokens: int) -> Job[Any]:
    return Job(kind, lambda: kind, num_tokens=num_tokens)


async def run_together(*jobs: tuple[SimulatedWorker, float, Job[Any]]) -> None:
    """Hand jobs to workers, each at its time."""

    async def run(worker: SimulatedWorker, at: float, job: Job[Any]) -> None:
        await trio.sleep_until(at)
        assert await worker.run(job) == job.kind

    async with trio.open_nursery() as nursery:
        for worker, at, job in jobs:
            nursery.start_soon(run, worker, at, job)


# --- durations of jobs ----------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [None, 0.0, 0.5, 1.0])
async def test_a_job_that_is_alone_takes_its_price(kappa, autojump_clock):
    d = device(kappa)
    await run_together((d.target, 0.0, job("verify", 8)), (d.draft, 8.0, job("draft", 3)))
    assert d.times("target") == [(0.0, 8.0)]
    assert d.times("draft") == [(8.0, 8.75)]


@pytest.mark.parametrize("kappa", [None, 0.0])
async def test_separate_devices_cost_each_other_nothing(kappa, autojump_clock):
    d = device(kappa)
    await run_together((d.target, 0.0, job("verify", 8)), (d.draft, 1.0, job("draft", 3)))
    assert d.times("target") == [(0.0, 8.0)]
    assert d.times("draft") == [(1.0, 1.75)]


@pytest.mark.parametrize("kappa", [0.25, 0.5, 1.0])
async def test_a_draft_step_costs_the_target_kappa_of_its_time(kappa, autojump_clock):
    d = device(kappa)
    await run_together((d.target, 0.0, job("verify", 8)), (d.draft, 1.0, job("draft", 8)))
    assert d.times("draft") == [(1.0, 1.0 + 2.0 * (1.0 + kappa))]
    assert d.times("target") == [(0.0, 8.0 + 2.0 * kappa)]


async def test_several_steps_under_one_verify_add_up(autojump_clock):
    d = device(0.5)
    steps = [(d.draft, 0.0, job("draft", 4))] * 3
    await run_together((d.target, 0.0, job("verify", 8)), *steps)
    assert d.times("draft") == [(0.0, 1.5), (1.5, 3.0), (3.0, 4.5)]
    assert d.times("target") == [(0.0, 9.5)]


async def test_a_step_that_outlasts_the_verify_is_alone_for_the_rest(autojump_clock):
    d = device(1.0)
    await run_together((d.target, 0.0, job("verify", 2)), (d.draft, 1.0, job("draft", 16)))
    # The target has 1 s left, which takes 2 s; in that time the step does 1 s of its 4.
    assert d.times("target") == [(0.0, 3.0)]
    assert d.times("draft") == [(1.0, 6.0)]


async def test_jobs_that_end_together_both_end(autojump_clock):
    d = device(1.0)
    await run_together((d.target, 0.0, job("verify", 2)), (d.draft, 0.0, job("draft", 8)))
    assert d.times("target") == d.times("draft") == [(0.0, 4.0)]
    await run_together((d.target, 4.0, job("verify", 1)))
    assert d.times("target")[1:] == [(4.0, 5.0)]


@pytest.mark.parametrize("kind", ["open", "close"])
async def test_what_does_not_go_through_a_model_costs_the_other_nothing(kind, autojump_clock):
    d = device(1.0)
    await run_together((d.target, 0.0, job("verify", 8)), (d.draft, 1.0, job(kind, 8)))
    assert d.times("target") == [(0.0, 8.0)]
    assert d.times("draft") == [(1.0, 3.0)]


@pytest.mark.parametrize("kind", ["prefill", "draft", "verify", "decode"])
async def test_whatever_goes_through_a_model_wants_the_device(kind, autojump_clock):
    d = device(1.0)
    await run_together((d.target, 0.0, job(kind, 1)), (d.draft, 0.0, job("draft", 4)))
    assert d.times("target") == d.times("draft") == [(0.0, 2.0)]


async def test_a_job_that_has_begun_on_a_shared_device_is_not_abandoned(autojump_clock):
    d = device(0.5)
    with trio.move_on_at(1.0) as scope:
        assert await d.target.run(job("verify", 2)) == "verify"
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert d.times("target") == [(0.0, 2.0)]


async def test_a_job_that_waits_for_its_turn_does_not_use_the_device(autojump_clock):
    d = device(1.0)
    await run_together(
        (d.target, 0.0, job("verify", 2)), (d.target, 1.0, job("verify", 2)), (d.draft, 5.0, job("draft", 4))
    )
    assert d.times("target") == [(0.0, 2.0), (2.0, 4.0)]
    assert d.times("draft") == [(5.0, 6.0)]


async def test_a_free_job_takes_no_time(autojump_clock):
    d = device(1.0)
    await run_together((d.target, 0.0, job("verify", 2)), (d.draft, 1.0, job("draft", 0)))
    assert d.times("draft") == [(1.0, 1.0)]
    assert d.times("target") == [(0.0, 2.0)]


async def test_workers_count_the_time_that_a_job_took_and_not_its_price(autojump_clock):
    d = device(1.0)
    verify = job("verify", 2)
    await run_together((d.target, 0.0, verify), (d.draft, 0.0, job("draft", 4)))
    assert verify.seconds == d.target.busy_seconds == 3.0
    assert d.draft.busy_seconds == 2.0


# --- runs of steps --------------------------------------------------------------------------------


def steps(widths: list[int], heard: list[Any], on_step: Callable[[int], None] = lambda number: None) -> Steps[Any]:
    """Steps of these widths; each reported result is appended to a list, with the time."""

    def step(number: int) -> Step[int]:
        if number + 1 == len(widths):
            return Step(number)
        return Step(number, lambda: step(number + 1), widths[number + 1])

    def hear(job: Job[Any], number: int, goes_on: bool) -> None:
        heard.append((trio.current_time(), number, goes_on))
        on_step(number)

    return Steps("draft", lambda: step(0), hear, num_tokens=widths[0])


async def test_each_step_takes_its_price_and_is_heard_of_when_it_is_done(autojump_clock):
    d, heard = device(None), list[Any]()
    await d.draft.run_steps(steps([8, 4, 2], heard))
    assert d.times("draft") == [(0.0, 2.0), (2.0, 3.0), (3.0, 3.5)]
    assert heard == [(2.0, 0, True), (3.0, 1, True), (3.5, 2, False)]
    assert [span.num_tokens for span in d.spans] == [8, 4, 2]
    assert d.draft.busy_seconds == 3.5


async def test_each_step_costs_the_target_kappa_of_its_time(autojump_clock):
    d = device(0.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.target.run, job("verify", 8))
        nursery.start_soon(d.draft.run_steps, steps([4, 4, 4], []))
    assert d.times("draft") == [(0.0, 1.5), (1.5, 3.0), (3.0, 4.5)]
    assert d.times("target") == [(0.0, 9.5)]


async def test_steps_that_are_interrupted_when_one_is_heard_of_end_with_it(autojump_clock):
    d, heard = device(None), list[Any]()
    interrupted = steps([4, 4, 4, 4], heard, lambda number: interrupted.interrupt() if number == 1 else None)
    await d.draft.run_steps(interrupted)
    assert [number for _, number, _ in heard] == [0, 1]
    assert trio.current_time() == 2.0


async def test_steps_that_are_interrupted_in_the_middle_of_one_end_after_it(autojump_clock):
    d, heard = device(None), list[Any]()
    interrupted = steps([4, 4, 4, 4], heard)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.draft.run_steps, interrupted)
        await trio.sleep(1.5)
        interrupted.interrupt()
    assert heard == [(1.0, 0, True), (2.0, 1, False)]
    assert trio.current_time() == 2.0


async def test_a_job_that_waits_has_its_turn_after_a_step(autojump_clock):
    d, heard = device(None), list[Any]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(d.draft.run_steps, steps([4, 4, 4], heard))
        await trio.sleep(0.5)
        await d.draft.run(job("prefill", 8))
    assert heard == [(1.0, 0, False)]
    assert d.times("draft") == [(0.0, 1.0), (1.0, 3.0)]


async def test_steps_of_a_call_that_is_cancelled_end_after_the_one_that_is_running(autojump_clock):
    d, heard = device(None), list[Any]()
    with trio.move_on_at(1.5) as scope:
        await d.draft.run_steps(steps([4, 4, 4, 4], heard))
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert heard == [(1.0, 0, True), (2.0, 1, False)]


async def test_an_error_in_a_step_comes_out_after_what_came_before_it(autojump_clock):
    d, heard = device(None), list[Any]()

    def fail() -> Any:
        raise ZeroDivisionError

    def hear(job: Job[Any], result: str, goes_on: bool) -> None:
        heard.append(result)

    with pytest.raises(JobError, match="draft failed"):
        await d.draft.run_steps(Steps("draft", lambda: Step("first", fail), hear))
    assert heard == ["first"]
    await d.draft.run(job("draft", 4))


async def test_an_error_of_the_one_who_hears_of_a_step_comes_out(autojump_clock):
    d, heard = device(None), list[Any]()

    def fail(number: int) -> None:
        raise KeyError(number)

    with pytest.raises(KeyError):
        await d.draft.run_steps(steps([4, 4], heard, fail))
    assert heard == [(1.0, 0, True)]
    await d.draft.run(job("draft", 4))


@pytest.mark.parametrize("kappa", [-0.1, 1.5, float("nan"), float("inf")])
def test_contention_outside_its_range_is_refused(kappa):
    with pytest.raises(SettingsError, match="contention must be a number between 0 and 1"):
        Contention(kappa)
