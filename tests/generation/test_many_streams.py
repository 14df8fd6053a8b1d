"""Many streams at once: at most `max_streams` run, the others follow in order, and no stream is delayed unfairly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama
from scripted import (
    HandedJob,
    ScriptedModel,
    Simulation,
    agreeing,
    collect,
    collect_all,
    continuation,
    priced,
    run,
    simulated,
    text_of,
    truthful,
)
from sweeps import sweep
from ways_to_cancel import by_aclose, by_dropping_unread, by_leaving, by_scope, by_scope_around_what_is_kept

import runtime
from actors.target.target_actor import TargetActor
from protocol.errors import RuntimeBrokenError, RuntimeClosedError
from protocol.session_state import SessionPhase
from protocol.trace import Instant, Span
from runtime.engine.sessions import BUFFERED_ROUNDS

# The jobs that occupy the target, for which streams wait for each other.
TURNS = ("prefill", "verify", "decode")

MIXED: list[dict[str, Any]] = [{"lookahead": lookahead} for lookahead in (3, 0, "auto", 1, 6)]


def pair(agreement: float = 0.7) -> tuple[ScriptedModel, ScriptedModel]:
    return ScriptedModel(truthful), ScriptedModel(agreeing(agreement))


@attrs.frozen
class Asked:
    """When sessions could have another chunk of their prompt, or another round, for the first time."""

    at: dict[int, list[float]] = attrs.field(factory=lambda: defaultdict(list))

    @classmethod
    @contextmanager
    def noted(cls) -> Iterator[Asked]:
        asked, look_at = cls(), TargetActor._look_at

        def noting(self: TargetActor, session: Any) -> None:
            if session.num_to_read > 0 or session.state.phase is not SessionPhase.PROPOSING:
                asked.at[session.id].append(trio.current_time())
            look_at(self, session)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TargetActor, "_look_at", noting)
            yield asked


def most_turns_in_between(simulation: Simulation, asked: Asked) -> list[int]:
    """For each job of the target, the maximum number of jobs that one other session had while it was waited for.

    For a chunk of a prompt, only chunks of others are counted: between two chunks, all rounds have a turn.
    """
    handed = [each for each in simulation.target_worker.handed if each.job.kind in TURNS and each.done_at is not None]
    last_done: dict[int, float] = {}
    most = []
    for waiting in handed:
        for session in sessions_of(waiting):
            own = last_done.get(session, 0.0)
            since = min((at for at in asked.at[session] if own <= at <= waiting.at), default=own)
            last_done[session] = waiting.done_at
            between = [other for other in handed if since < other.done_at < waiting.done_at]
            if waiting.job.kind == "prefill":
                between = [other for other in between if other.job.kind == "prefill"]
            turns = Counter(other for job in between if session not in sessions_of(job) for other in sessions_of(job))
            most.append(max(turns.values(), default=0))
    return most


def sessions_of(handed: HandedJob) -> set[int]:
    """The sessions that have a part in a job."""
    job = handed.job
    return {share.session for share in job.shares} or ({job.session} if job.session is not None else set())


def at_work(simulation: Simulation) -> list[int]:
    """At each event, how many sessions had a sequence open or had asked for one, at either model."""
    sequences = {"target": set[int | None](), "draft": set[int | None]()}
    numbers = []
    for event in simulation.events:
        if isinstance(event, Instant) and event.kind == "open":
            sequences[event.actor].add(event.session)
        if isinstance(event, Span) and event.kind == "close":
            sequences[event.actor].discard(event.session)
        numbers.append(len(sequences["target"] | sequences["draft"]))
    return numbers


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.slow
@sweep("num_streams, agreement, schedule", [(2, 0.7, 0), (2, 1.0, 1), (5, 0.0, 2), (5, 0.7, 1), (5, 1.0, 0)])
async def test_no_stream_waits_for_more_than_one_turn_of_each_other(num_streams, agreement, schedule, autojump_clock):
    price = priced(prefill=16.0, draft=1.0)
    with Asked.noted() as asked:
        async with simulated(*pair(agreement), price=price, schedule=schedule, max_batch=1) as simulation:
            async with trio.open_nursery() as nursery:
                for n in range(num_streams):
                    # Some decode from the start. Others come later, with long prompts to prefill meanwhile.
                    prompt = list(range(n + 1)) if n % 2 == 0 else [n] * 40
                    call = partial(text_of, simulation, prompt, max_tokens=40, prefill_step_size=2, **MIXED[n])
                    nursery.start_soon(call)
                    await trio.sleep(25 * n)
            turns = most_turns_in_between(simulation, asked)
    assert max(turns) == 1
    # Often there was another session to wait for.
    assert turns.count(1) > 4 * num_streams
    kinds = {
        kind: {each.job.session for each in simulation.target_worker.handed if each.job.kind == kind} for kind in TURNS
    }
    assert all(kinds.values())


@pytest.mark.slow
@settings(max_examples=20)
@given(
    streams=st.lists(
        st.tuples(
            st.sampled_from(MIXED),
            st.integers(1, 20),  # length of the prompt
            st.integers(1, 4),  # prefill step size
            st.sampled_from([0.0, 3.0, 30.0]),  # pause before it begins
        ),
        min_size=2,
        max_size=5,
    ),
    draft_step=st.sampled_from([0.25, 2.0, 16.0]),
    max_streams=st.sampled_from([None, 1, 2]),
)
def test_turns_go_round_and_texts_are_right_whoever_comes_when(
    streams: list[tuple[dict[str, Any], int, int, float]], draft_step: float, max_streams: int | None
) -> None:
    async def main(asked: Asked) -> None:
        texts: dict[int, list[int]] = {}
        async with simulated(*pair(), price=priced(draft=draft_step), max_streams=max_streams) as simulation:

            async def one(n: int, length: int, chunk: int, how: dict[str, Any]) -> None:
                texts[n] = await text_of(simulation, [n] * length, max_tokens=12, prefill_step_size=chunk, **how)

            async with trio.open_nursery() as nursery:
                for n, (how, length, chunk, pause) in enumerate(streams):
                    await trio.sleep(pause)
                    nursery.start_soon(one, n, length, chunk, how)
            # The pass that runs, and one that leaves the round out.
            assert max(most_turns_in_between(simulation, asked)) <= 2
            if max_streams is not None:
                assert max(at_work(simulation)) <= max_streams
        assert texts == {n: continuation([n] * length, 12) for n, (_, length, _, _) in enumerate(streams)}

    with Asked.noted() as asked:
        run(main, asked)


# --- max_streams ----------------------------------------------------------------------------------


@sweep(("max_streams", "most"), [(1, 1), (2, 2), (3, 3), (None, 7)])
async def test_no_more_streams_are_at_work_than_there_are_places(max_streams, most, autojump_clock):
    async with simulated(*pair(), max_streams=max_streams) as simulation:
        rt = simulation.runtime
        streams = [rt.stream([n], max_tokens=10, **MIXED[n % 5]) for n in range(7)]
        assert (rt.num_streams, rt.num_waiting) == (most, 7 - most)
        assert await collect_all(streams) == [continuation([n], 10) for n in range(7)]
        await trio.testing.wait_all_tasks_blocked()
        assert (rt.num_streams, rt.num_waiting) == (0, 0)
    assert max(at_work(simulation)) == most
    # In the order of the calls.
    opened = [instant.session for instant in simulation.instants("open", "target")]
    assert opened == sorted(opened)


async def test_a_stream_that_waits_costs_the_models_nothing_and_begins_when_there_is_room(autojump_clock):
    async with simulated(*pair(), max_streams=1) as simulation:
        first = simulation.runtime.stream([1], max_tokens=10, lookahead=2)
        second = simulation.runtime.stream([2], max_tokens=10, lookahead=2)
        assert await collect(first) == continuation([1], 10)
        ended = trio.current_time()
        assert simulation.spans("target", session=1) == simulation.spans("draft", session=1) == []
        assert await collect(second) == continuation([2], 10)
        waited = second.statistics().time_to_first_token
        # Counted from the call, which was at the very beginning.
        assert waited > ended
        # As soon as the drafter had finished its running step.
        assert simulation.spans("target", session=1)[0].began <= ended + 1


@sweep("num_rounds", [10, BUFFERED_ROUNDS, BUFFERED_ROUNDS + 1])
async def test_a_text_that_the_models_are_done_with_makes_room_though_nobody_reads_it(num_rounds, autojump_clock):
    async with simulated(*pair(), max_streams=1) as simulation:
        unread = simulation.runtime.stream([1], max_tokens=num_rounds, lookahead=0)
        # What came last may not fit into the buffer of unread tokens.
        assert await text_of(simulation, [2], max_tokens=10) == continuation([2], 10)
        assert await collect(unread) == continuation([1], num_rounds)


@sweep("way", [by_scope, by_scope_around_what_is_kept, by_aclose, by_leaving, by_dropping_unread])
async def test_a_stream_that_waits_can_be_cancelled_in_every_way(way, autojump_clock):
    async with simulated(*pair(), max_streams=1) as simulation, trio.open_nursery() as nursery:
        rt = simulation.runtime
        first, scope, due = rt.stream([1], max_tokens=20, lookahead=2), trio.CancelScope(), trio.Event()
        nursery.start_soon(way, partial(rt.stream, [2], max_tokens=20, lookahead=2), scope, due)
        await trio.sleep(2)
        last = rt.stream([3], max_tokens=20, lookahead=2)
        assert rt.num_waiting == 2
        scope.cancel()
        due.set()
        await trio.testing.wait_all_tasks_blocked()
        assert trio.current_time() == 2
        assert (rt.num_streams, rt.num_waiting) == (1, 1)
        assert await collect(first) == continuation([1], 20)
        assert await collect(last) == continuation([3], 20)
        # No model ever heard of it.
        assert {event.session for event in simulation.events} == {0, 2}


@sweep("lookahead", [0, 2])
def test_a_place_is_given_on_once_the_job_of_a_cancelled_stream_has_ended(lookahead):
    async def cancel_after(delay: float) -> None:
        async with simulated(*pair(), max_streams=1, schedule=int(delay)) as simulation:
            first = simulation.runtime.stream([1] * 6, max_tokens=20, lookahead=lookahead, prefill_step_size=2)
            second = simulation.runtime.stream([2], max_tokens=10, lookahead=lookahead)
            await trio.sleep(delay)
            await first.aclose()
            assert await collect(second) == continuation([2], 10)
            await trio.sleep(100)
            ends = [span.ended for actor in ("target", "draft") for span in simulation.spans(actor, session=0)]
            begins = [span.began for actor in ("target", "draft") for span in simulation.spans(actor, session=1)]
            assert max(ends, default=0.0) <= min(begins) <= max([delay, *ends])

    for i in range(9):
        run(cancel_after, i * 6.25)


async def test_leaving_the_runtime_tells_the_streams_that_wait(autojump_clock):
    told = []

    async def wait(stream: runtime.TokenStream) -> None:
        with pytest.raises(RuntimeClosedError):
            await anext(stream)
        told.append(trio.current_time())

    async with trio.open_nursery() as nursery, simulated(*pair(), max_streams=1) as simulation:
        streams = [simulation.runtime.stream([n], max_tokens=30) for n in range(4)]
        for stream in streams[1:]:
            nursery.start_soon(wait, stream)
        await trio.sleep(3)
    assert told == [3.0] * 3
    assert {event.session for event in simulation.events} == {0}


@sweep("delay", [3.0, 5.0, 9.0, 20.0])
async def test_cancelling_the_runtime_begins_no_stream_that_waits(delay, autojump_clock):
    with trio.move_on_after(delay):
        async with simulated(*pair(), max_streams=1) as simulation, trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(partial(text_of, simulation, [n] * 9, max_tokens=30, prefill_step_size=2))
            await trio.sleep_forever()
    assert len({event.session for event in simulation.events}) <= 1
    assert simulation.runtime.num_waiting == simulation.runtime.num_streams == 0


async def test_a_target_that_fails_ends_the_streams_that_wait_too(autojump_clock):
    target = ScriptedModel(truthful, fails={"feed": range(4, 1000)})
    async with simulated(target, max_streams=1) as simulation:
        streams = [simulation.runtime.stream([n], max_tokens=30) for n in range(3)]
        for stream in streams:
            with pytest.raises(RuntimeBrokenError):
                await collect(stream)


@sweep(
    ("options", "most"),
    [({}, 16), ({"max_batch": 9}, 9), ({"max_batch": 2}, 4), ({"max_batch": 1}, 4), ({"rewind": "trim"}, 4)],
)
async def test_as_many_streams_as_a_pass_takes_are_at_work_by_themselves(options, most):
    async with runtime.open((llama(), None), max_streams="auto", **options) as rt:
        assert rt.max_streams == most


async def test_a_consumer_that_is_overtaken_while_it_takes_a_commit_gets_the_rest(autojump_clock):
    num_tokens = BUFFERED_ROUNDS + 10
    async with simulated(ScriptedModel(truthful)) as simulation:
        stream = simulation.runtime.stream([1], max_tokens=num_tokens, lookahead=0)
        await trio.sleep(10_000)  # until the channel is full, and one more commit waits
        taken = stream._commits.receive_nowait()
        # Before the consumer tells that it has taken something, the target hands over what waited.
        simulation.runtime._target._deliver()
        stream._session.make_room()
        assert list(taken.tokens) + await collect(stream) == continuation([1], num_tokens)
