"""Workers in simulated time: the duration of a job, alone and beside another on a shared device."""

from __future__ import annotations

from typing import Any

import attrs
import trio
from simulated_worker import Contention, SimulatedWorker
from sweeps import sweep

from actors.workers.worker import Job
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


async def run_together(d: Device, *jobs: tuple[Actor, float, SpanKind, int]) -> None:
    """Hand jobs, each of a kind and of so many tokens, to the actors' workers, each at its time."""

    async def run(actor: Actor, at: float, kind: SpanKind, num_tokens: int) -> None:
        await trio.sleep_until(at)
        assert await (d.target if actor == "target" else d.draft).run(job(kind, num_tokens)) == kind

    async with trio.open_nursery() as nursery:
        for one in jobs:
            nursery.start_soon(run, *one)


# --- durations of jobs ----------------------------------------------------------------------------

VERIFY = ("target", 0.0, "verify", 8)


@sweep(
    "kappa, jobs, of_target, of_draft",
    [
        # Alone.
        *(
            (kappa, [VERIFY, ("draft", 8.0, "draft", 3)], [(0.0, 8.0)], [(8.0, 8.75)])
            for kappa in (None, 0.0, 0.5, 1.0)
        ),
        # On separate devices.
        *((kappa, [VERIFY, ("draft", 1.0, "draft", 3)], [(0.0, 8.0)], [(1.0, 1.75)]) for kappa in (None, 0.0)),
        # A step costs the target kappa of its time, and so do several.
        *(
            (kappa, [VERIFY, ("draft", 1.0, "draft", 8)], [(0.0, 8.0 + 2.0 * kappa)], [(1.0, 3.0 + 2.0 * kappa)])
            for kappa in (0.25, 0.5, 1.0)
        ),
        (0.5, [VERIFY, *[("draft", 0.0, "draft", 4)] * 3], [(0.0, 9.5)], [(0.0, 1.5), (1.5, 3.0), (3.0, 4.5)]),
        # One that outlasts the verify: the target has 1 s left, which takes 2 s; in that time the step does 1 s of 4.
        (1.0, [("target", 0.0, "verify", 2), ("draft", 1.0, "draft", 16)], [(0.0, 3.0)], [(1.0, 6.0)]),
        # Jobs that end together.
        (
            1.0,
            [("target", 0.0, "verify", 2), ("draft", 0.0, "draft", 8), ("target", 4.0, "verify", 1)],
            [(0.0, 4.0), (4.0, 5.0)],
            [(0.0, 4.0)],
        ),
        # What does not go through a model costs the other nothing; whatever does, wants the device.
        *((1.0, [VERIFY, ("draft", 1.0, kind, 8)], [(0.0, 8.0)], [(1.0, 3.0)]) for kind in ("open", "close")),
        *(
            (1.0, [("target", 0.0, kind, 1), ("draft", 0.0, "draft", 4)], [(0.0, 2.0)], [(0.0, 2.0)])
            for kind in ("prefill", "draft", "verify", "decode")
        ),
        # A job that waits for its turn does not use the device.
        (
            1.0,
            [("target", 0.0, "verify", 2), ("target", 1.0, "verify", 2), ("draft", 5.0, "draft", 4)],
            [(0.0, 2.0), (2.0, 4.0)],
            [(5.0, 6.0)],
        ),
        # A free job takes no time.
        (1.0, [("target", 0.0, "verify", 2), ("draft", 1.0, "draft", 0)], [(0.0, 2.0)], [(1.0, 1.0)]),
    ],
)
async def test_jobs_take_their_prices_and_cost_each_other_kappa_of_their_time(
    kappa, jobs, of_target, of_draft, autojump_clock
):
    d = device(kappa)
    await run_together(d, *jobs)
    assert (d.times("target"), d.times("draft")) == (of_target, of_draft)


async def test_a_job_that_has_begun_on_a_shared_device_is_not_abandoned(autojump_clock):
    d = device(0.5)
    with trio.move_on_at(1.0) as scope:
        assert await d.target.run(job("verify", 2)) == "verify"
        await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
    assert d.times("target") == [(0.0, 2.0)]
