"""The end of a runtime: streams that are begun while it is cancelled, and closing it by its own method."""

import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

import pytest
import trio
import trio.testing
from blocking_models import BlockingModel
from greedy_pair import target
from our_threads import outrider_threads
from scripted import ScriptedModel, Simulation, agreeing, collect, continuation, read_into, run, simulated, truthful
from sweeps import sweep

import runtime
from protocol.errors import RuntimeClosedError

PROMPT = [5, 6, 7, 8, 9]

Begin = Callable[[Simulation], Awaitable[object]]
Drafter = Literal["model", "ngram", "none"]


def drafter(kind: Drafter) -> Any:
    return {"model": ScriptedModel(agreeing(0.6)), "ngram": "ngram", "none": None}[kind]


async def stream(simulation: Simulation) -> None:
    got: list[int] = []
    try:
        await read_into(got, simulation.runtime.stream(PROMPT, max_tokens=60, lookahead=2))
    finally:
        assert got == continuation(PROMPT, len(got))


async def many(simulation: Simulation) -> None:
    await simulation.runtime.generate_many([PROMPT, [1], [2]], max_concurrent=2, max_tokens=60)


async def one_of_many(simulation: Simulation) -> None:
    async for _ in simulation.runtime.generate_many([PROMPT, [1], [2]], max_concurrent=2, max_tokens=60):
        pass


async def cancel_and_begin(
    begin: Begin,
    ticks: int,
    *,
    wait: float = 0.0,
    draft: Drafter,
    at: float,
    num_before: int,
    schedule: int,
    max_streams: int | None,
) -> None:
    """Cancel a runtime whose body goes on for a while, and begin something `ticks` turns, or a while later.

    Args:
        ticks: turns of the event loop; negative for turns before the cancellation.
        wait: further seconds.
        at: seconds after which the runtime is cancelled.
        num_before: number of streams that run by then.
    """
    outer = trio.CancelScope()
    began = trio.Event()
    over = trio.Event()
    simulations: list[Simulation] = []

    async def body() -> None:
        with outer:
            how: Any = {"schedule": schedule, "max_streams": max_streams}
            async with simulated(ScriptedModel(truthful), drafter(draft), **how) as simulation:
                simulations.append(simulation)
                began.set()
                with trio.CancelScope(shield=True):
                    await over.wait()

    async def read_one(prompt: list[int]) -> None:
        got: list[int] = []
        with pytest.raises(RuntimeClosedError):
            await read_into(got, simulations[0].runtime.stream(prompt, max_tokens=None, lookahead=2))
        assert got == continuation(prompt, len(got))

    async def cancel() -> None:
        for _ in range(max(0, -ticks)):
            await trio.lowlevel.checkpoint()
        outer.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(body)
        await began.wait()
        for i in range(num_before):
            nursery.start_soon(read_one, [i])
        await trio.sleep(at)
        nursery.start_soon(cancel)
        for _ in range(1 + max(0, ticks)):
            await trio.lowlevel.checkpoint()
        await trio.sleep(wait)
        try:
            with pytest.raises(RuntimeClosedError):
                await begin(simulations[0])
            assert simulations[0].runtime.num_streams == simulations[0].runtime.num_waiting == 0
        finally:
            over.set()


@pytest.mark.slow
@sweep(
    ("begin", "draft", "num_before", "max_streams"),
    [
        (begin, draft, *running)
        for i, begin in enumerate([stream, many, one_of_many])
        for draft, running in zip(["model", "ngram", "none"], ([(0, None), (3, None), (3, 1)] * 2)[i:], strict=False)
    ],
)
def test_what_begins_as_the_runtime_is_cancelled_finds_it_closed(begin, draft, num_before, max_streams):
    how: Any = {"draft": draft, "num_before": num_before, "max_streams": max_streams}
    # In the middle of a long job; and at a moment at which jobs begin and end.
    for at, ticks in itertools.product((10.25, 24.0), range(-3, 12, 2)):
        run(partial(cancel_and_begin, begin, ticks, at=at, schedule=ticks, **how))
    # During the last job, and after it.
    for quarters in range(1, 31, 6):
        run(partial(cancel_and_begin, begin, 0, wait=quarters / 4, at=10.25, schedule=quarters, **how))


def test_a_runtime_that_was_cancelled_before_its_block_began_takes_no_streams():
    async def cancelled_after(num_ticks: int, schedule: int) -> int:
        num_begun = 0
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    for _ in range(num_ticks):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel)
                async with simulated(ScriptedModel(truthful), drafter("model"), schedule=schedule) as simulation:
                    num_begun += 1
                    with trio.CancelScope(shield=True), pytest.raises(RuntimeClosedError):
                        await collect(simulation.runtime.stream(PROMPT, max_tokens=None))
        return num_begun

    assert sum(run(cancelled_after, n, schedule) for n in range(10) for schedule in range(5)) > 0


# --- by its own method ---------------------------------------------------------------------------


async def test_closing_what_was_served_waits_for_the_forward_pass_and_joins_the_threads():
    held = BlockingModel(target())
    closed: list[int] = []
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (held, None))
        held.block()

        @nursery.start_soon
        async def read() -> None:
            with pytest.raises(runtime.RuntimeClosedError, match="runtime was closed"):
                await rt.generate(PROMPT, max_tokens=400)

        async def close() -> None:
            await rt.aclose()
            closed.append(len(outrider_threads()))

        await held.blocked_in_trio()
        with trio.CancelScope() as scope:
            scope.cancel()
            await rt.aclose()
        # Only the wait was cancelled.
        assert scope.cancelled_caught
        with pytest.raises(runtime.RuntimeClosedError, match="open another"):
            rt.stream(PROMPT)
        nursery.start_soon(close)
        nursery.start_soon(close)
        await trio.testing.wait_all_tasks_blocked()
        assert closed == []
        held.release()
    # The task that served the runtime has ended by itself, or the nursery would still be open.
    assert closed == [0, 0]
    await rt.aclose()


async def test_cancelling_the_nursery_releases_whoever_closes():
    async with trio.open_nursery() as nursery:
        rt = await nursery.start(runtime.keep_open, (target(), None))
        nursery.cancel_scope.cancel()
    await rt.aclose()
    assert outrider_threads() == []
