"""Whenever and however a generation is cancelled, its consumer is back at once, and the models are free soon after.

Each way of cancelling is tried at every event of a generation, and at times on a grid that is finer than the events.
The consumer must be back at the same instant, no job of the session may begin, and the next stream must be right. On
exit, `simulated` finds any task or sequence that is left over.
"""

import gc
from functools import partial
from typing import Any

import pytest
import trio
from scripted import (
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    continuation,
    priced,
    read_into,
    run,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep
from ways_to_cancel import Begin, Way, by_aclose, by_dropping_unread, by_leaving, by_scope, by_scope_around_what_is_kept

from protocol.errors import RuntimeClosedError
from protocol.trace import Event
from runtime import TokenStream

PROMPT = [5, 6, 7, 8, 9, 10]
SETTINGS: dict[str, Any] = {"max_tokens": 10, "prefill_step_size": 2}
TEXT = continuation(PROMPT, 10)
OTHER_PROMPT = [1, 2, 3]
OTHER_TEXT = continuation(OTHER_PROMPT, 8)
MODEL_WORK = ("prefill", "draft", "verify", "decode")

DECISIONS = ("proposal", "verdict", "hit", "miss", "withdraw")


# --- ways to cancel -------------------------------------------------------------------------------


class ConsumerError(Exception):
    pass


async def by_scope_inside_async_with(begin: Begin, scope: trio.CancelScope, _: trio.Event) -> None:
    with scope:
        async with begin() as stream:
            await collect(stream)


async def by_scope_around_other_work(begin: Begin, scope: trio.CancelScope, _: trio.Event) -> None:
    with scope:
        async for _token in begin():
            await trio.sleep(3)


async def by_aclose_in_a_cancelled_scope(begin: Begin, _: trio.CancelScope, due: trio.Event) -> None:
    stream = begin()
    await due.wait()
    with trio.CancelScope() as cancelled:
        cancelled.cancel()
        await stream.aclose()
    assert cancelled.cancelled_caught


async def by_an_error_inside_async_with(begin: Begin, _: trio.CancelScope, due: trio.Event) -> None:
    async def consume() -> None:
        async with begin():
            await due.wait()
            raise ConsumerError

    with pytest.raises(ConsumerError):
        await consume()


WAYS: list[Way] = [
    *(by_scope, by_scope_around_what_is_kept, by_scope_inside_async_with, by_scope_around_other_work),
    *(by_aclose, by_aclose_in_a_cancelled_scope, by_leaving, by_an_error_inside_async_with, by_dropping_unread),
]


def models(lookahead: Any) -> tuple[ScriptedModel, Any]:
    """A target, and its drafter: a model, "ngram" in place of a lookahead, or none."""
    return ScriptedModel(truthful), ScriptedModel(agreeing(0.6)) if lookahead not in (None, "ngram") else lookahead


def settings_of(lookahead: Any) -> dict[str, Any]:
    return {**SETTINGS, "lookahead": {None: 0, "ngram": 3}.get(lookahead, lookahead)}


def assert_ended(simulation: Simulation, at: float, *, session: int = 0) -> None:
    """Assert that, after an instant, a session began no job, ran at most one per actor, and decided nothing."""
    for actor in ("target", "draft"):
        jobs = simulation.spans(actor, *MODEL_WORK, session=session)
        assert [job for job in jobs if job.began > at] == []
        assert len([job for job in jobs if job.ended > at]) <= 1
    decisions = [made for kind in DECISIONS for made in simulation.instants(kind) if made.session == session]
    assert [made for made in decisions if made.at > at] == []


def assert_free(simulation: Simulation, at: float, *, session: int = 0) -> None:
    """Assert that the models were free of a session as soon as the running jobs were done."""
    for actor in ("target", "draft"):
        running = [job.ended for job in simulation.spans(actor, *MODEL_WORK, session=session) if job.ended > at]
        for close in simulation.spans(actor, "close", session=session):
            assert close.ended <= max([at, *running])


async def assert_over(simulation: Simulation, at: float) -> None:
    """Assert that a session that was cancelled just now is gone, and that the next text is right."""
    await trio.testing.wait_all_tasks_blocked()
    assert trio.current_time() == at
    assert simulation.runtime.num_streams == 0
    await trio.sleep(100)
    assert_free(simulation, at)
    assert await text_of(simulation, OTHER_PROMPT, max_tokens=8) == OTHER_TEXT
    assert_ended(simulation, at)


async def count_events(way: Way, lookahead: Any, schedule: int) -> int:
    """The number of events of a generation until its consumer is back or everything is at rest."""
    is_over = False
    num_events = 0

    def count(_: Event) -> None:
        nonlocal num_events
        num_events += not is_over

    async with simulated(*models(lookahead), listener=count, schedule=schedule) as simulation:
        with trio.move_on_after(10_000):
            open_stream = partial(simulation.runtime.stream, PROMPT, **settings_of(lookahead))
            await way(open_stream, trio.CancelScope(), trio.Event())
        is_over = True
    return num_events


async def cancel_at_event(way: Way, lookahead: Any, n: int, *, schedule: int, goes_on_at_once: bool) -> str:
    """Cancel a generation at its n-th event, and check the consequences. Returns the kind of that event."""
    scope, due = trio.CancelScope(), trio.Event()
    events: list[Event] = []
    struck_at = None

    def strike(event: Event) -> None:
        nonlocal struck_at
        events.append(event)
        if len(events) == n:
            struck_at = trio.current_time()
            scope.cancel()
            due.set()

    async with simulated(*models(lookahead), listener=strike, schedule=schedule) as simulation:
        open_stream = partial(simulation.runtime.stream, PROMPT, **settings_of(lookahead))
        kept = await way(open_stream, scope, due)
        del open_stream
        assert trio.current_time() == struck_at
        if not goes_on_at_once:
            await assert_over(simulation, struck_at)
        settings = {**settings_of(lookahead), "max_tokens": len(OTHER_TEXT)}
        assert await text_of(simulation, OTHER_PROMPT, **settings) == OTHER_TEXT
        await trio.sleep(1000)
        assert_ended(simulation, struck_at)
        if kept is not None and kept.finish_reason is None:
            with pytest.raises(RuntimeClosedError):
                await anext(kept)
    return f"{events[n - 1].actor} {events[n - 1].kind}"


# --- at every event -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", [None, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_generation_can_be_cancelled_at_any_event(way, lookahead):
    kinds = set()
    schedule = WAYS.index(way)
    # At every event in one way, and at every seventh in each of the others.
    for n in range(1 + schedule % 7, run(count_events, way, lookahead, schedule) + 1, 1 if way is by_scope else 7):
        cancel = partial(cancel_at_event, schedule=schedule, goes_on_at_once=bool((n + schedule) % 2))
        kinds.add(run(cancel, way, lookahead, n))
    wanted = {"target prefill", "target decode"}
    if lookahead is not None:
        wanted = {"target verify", "target verdict", "draft proposal", "draft draft", "draft hit", "draft miss"}
        wanted |= {"target prefill", "draft prefill", "target open", "draft open"}
    assert way is not by_scope or kinds >= wanted


@sweep("lookahead", [None, 2, "ngram"])
async def test_breaking_off_at_any_token_ends_the_generation(lookahead, autojump_clock):
    for last in range(len(TEXT) - 1):
        async with simulated(*models(lookahead), schedule=last) as simulation:
            got = []
            async for token in simulation.runtime.stream(PROMPT, **settings_of(lookahead)):
                got.append(token.id)
                at = trio.current_time()
                if token.index == last:
                    break
            assert got == TEXT[: last + 1]
            await assert_over(simulation, at)


@pytest.mark.slow
@sweep("way, lookahead", [("stream", None), ("stream", 2), ("generate", 2), ("slow consumer", 2)])
def test_a_timeout_ends_the_generation_at_any_time(way, lookahead):
    async def give_up_after(seconds: float) -> bool:
        async with simulated(*models(lookahead), schedule=int(seconds * 4)) as simulation:
            settings = settings_of(lookahead)
            with trio.move_on_after(seconds) as scope:
                if way == "generate":
                    await simulation.runtime.generate(PROMPT, **settings)
                else:
                    async for _ in simulation.runtime.stream(PROMPT, **settings):
                        await trio.sleep(2.5 if way == "slow consumer" else 0.0)
            if not scope.cancelled_caught:
                return False
            await assert_over(simulation, seconds)
            return True

    timeout = 0.0
    while run(give_up_after, timeout):
        timeout += 4.75
    # Two chunks of prefill, and at least five rounds.
    assert timeout > 3 * 4 + 5 * 8


# --- at the edges ---------------------------------------------------------------------------------


async def test_a_stream_in_a_reference_cycle_ends_when_the_collector_finds_it(autojump_clock):
    async with simulated(*models(2)) as simulation:
        cycle: list[Any] = [simulation.runtime.stream(PROMPT, max_tokens=None, lookahead=2)]
        cycle.append(cycle)
        await anext(cycle[0])
        del cycle
        gc.collect()
        at = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        assert simulation.runtime.num_streams == 0
        await trio.sleep(1000)
        assert_ended(simulation, at)


async def test_jobs_of_a_cancelled_session_that_wait_behind_anothers_are_taken_back(autojump_clock):
    price = priced(verify=8.0, draft=1.0, prefill=32.0)
    async with simulated(*models(2), price=price) as simulation, trio.open_nursery() as nursery:
        nursery.start_soon(partial(text_of, simulation, list(range(40)), max_tokens=20))
        await trio.sleep(1)
        cancelled = simulation.runtime.stream(PROMPT, **settings_of(2))
        await trio.sleep(1)
        # Both models are in the other session's prefill, and this one's jobs wait.
        await cancelled.aclose()
        await trio.sleep(200)
        assert simulation.spans("target", *MODEL_WORK, session=1) == []
        assert simulation.spans("draft", *MODEL_WORK, session=1) == []


@sweep("victim", [0, 1, 2])
def test_cancelling_one_of_several_sessions_leaves_the_others_as_they_are(victim):
    prompts = [PROMPT, OTHER_PROMPT, [9]]

    async def cancel_after(delay: float) -> None:
        async with simulated(*models(2), schedule=int(delay)) as simulation:
            texts: dict[int, list[int]] = {}
            scopes = [trio.CancelScope() for _ in prompts]

            async def one(n: int) -> None:
                with scopes[n]:
                    texts[n] = await text_of(simulation, prompts[n], max_tokens=12, lookahead=2)

            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(one, n)
                    await trio.lowlevel.checkpoint()
                await trio.sleep(delay)
                scopes[victim].cancel()
            has_ended_before = texts.pop(victim, None) is not None
            assert texts == {n: continuation(prompts[n], 12) for n in range(3) if n != victim}
            if has_ended_before:
                return
            await trio.sleep(100)
            states = simulation.target_worker.sessions.all_states
            [session] = [id for id in range(3) if list(states[id].shared.opened.prompt) == prompts[victim]]
            assert_ended(simulation, delay, session=session)

    for i in range(6):
        run(cancel_after, i * 14.25 + 0.5)


# --- leaving the runtime --------------------------------------------------------------------------


def latest_end(simulation: Simulation, at: float) -> float:
    """The end of the last job that was running at an instant."""
    work = [*simulation.spans("target", *MODEL_WORK), *simulation.spans("draft", *MODEL_WORK)]
    assert [span for span in work if span.began > at] == []
    return max([at, *(span.ended for span in work)])


@sweep("lookahead", [None, 2])
def test_leaving_the_runtime_ends_its_streams_after_the_running_jobs(lookahead):
    async def leave_after(delay: float) -> None:
        left_at = None

        async def consume(stream: TokenStream) -> None:
            got: list[int] = []
            with pytest.raises(RuntimeClosedError):
                await read_into(got, stream)
            assert trio.current_time() == delay
            assert got == continuation(PROMPT, len(got))

        async with trio.open_nursery() as nursery:
            async with simulated(*models(lookahead), schedule=int(delay)) as simulation:
                for _ in range(2):
                    settings = {**settings_of(lookahead), "max_tokens": 30}
                    nursery.start_soon(consume, simulation.runtime.stream(PROMPT, **settings))
                await trio.sleep(delay)
            left_at = trio.current_time()
        assert left_at == latest_end(simulation, delay)
        with pytest.raises(RuntimeClosedError):
            simulation.runtime.stream(PROMPT)

    for i in range(9):
        run(leave_after, i * 11.25 + 0.25)


@sweep("lookahead", [None, 2])
def test_cancelling_the_runtime_itself_takes_as_long_as_the_jobs_that_are_running(lookahead):
    async def cancel_after(delay: float) -> None:
        num_tasks = trio.lowlevel.current_statistics().tasks_living
        with trio.move_on_after(delay):
            async with simulated(*models(lookahead), schedule=int(delay)) as simulation, trio.open_nursery() as nursery:
                for n in range(2):
                    nursery.start_soon(partial(text_of, simulation, [n], max_tokens=60))
                await trio.sleep_forever()
        assert trio.current_time() == latest_end(simulation, delay)
        assert trio.lowlevel.current_statistics().tasks_living == num_tasks
        simulation.assert_all_closed()
        assert simulation.runtime.num_streams == 0

    for i in range(7):
        run(cancel_after, i * 14.25 + 0.25)


async def test_tokens_that_were_committed_before_the_runtime_was_left_can_still_be_read(autojump_clock):
    async with simulated(*models(2)) as simulation:
        stream = simulation.runtime.stream(PROMPT, max_tokens=30, lookahead=2)
        await trio.sleep(60)
    got: list[int] = []
    with pytest.raises(RuntimeClosedError):
        await read_into(got, stream)
    assert len(got) >= 5
    assert got == continuation(PROMPT, len(got))
