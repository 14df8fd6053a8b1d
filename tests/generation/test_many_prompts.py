"""Many prompts at a time: each text is the same as alone, none is begun in vain, and none is left over."""

import gc
import itertools
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
import trio
from sample_tokenizers import OneLetterTokenizer
from scripted import ScriptedModel, Simulation, agreeing, continuation, ids, priced, run, simulated, text_of, truthful
from sweeps import sweep
from ways_to_cancel import Begin, Way, by_aclose, by_break, by_leaving, by_scope, read

from protocol.errors import (
    PromptError,
    RewindError,
    RuntimeBrokenError,
    RuntimeClosedError,
    SettingsError,
    StreamBusyError,
)
from runtime import Completion, Completions

PROMPTS = [[5, 6, 7], [1, 2], [9, 8, 7, 6], [4], [3, 3, 3], [60, 61]]
SETTINGS: dict[str, Any] = {"max_tokens": 6, "lookahead": 2}


def pair() -> tuple[ScriptedModel, ScriptedModel]:
    return ScriptedModel(truthful), ScriptedModel(agreeing(0.6))


def texts(completions: Sequence[Completion]) -> list[list[int]]:
    return [ids(completion.tokens) for completion in completions]


def begun(simulation: Simulation) -> list[tuple[int, ...]]:
    """The prompts of the sessions that were begun."""
    return [instant.tokens for instant in simulation.instants("open", "target")]


async def assert_over(simulation: Simulation) -> None:
    """Assert that nothing is generated any more, and that the next generation is right."""
    assert simulation.runtime.num_streams == 0
    await trio.sleep(100)
    num_events = len(simulation.events)
    await trio.sleep(1000)
    assert len(simulation.events) == num_events
    simulation.assert_all_closed()
    assert await text_of(simulation, [1, 2, 3], max_tokens=3) == continuation([1, 2, 3], 3)


# --- results --------------------------------------------------------------------------------------


# A text ends with the first of these tokens, which takes a different time for each prompt.
STOPS = [token for token in range(64) if token % 4 == 0]


async def test_one_by_one_they_come_as_they_finish(autojump_clock):
    expected = [continuation(prompt, 40, STOPS) for prompt in PROMPTS]
    assert len({len(text) for text in expected}) > 3
    async with simulated(ScriptedModel(truthful)) as simulation:
        many = simulation.runtime.generate_many(PROMPTS, max_tokens=40, stop_tokens=STOPS)
        got, finished_at = [], []
        async for index, completion in many:
            got.append(index)
            finished_at.append(trio.current_time())
            assert ids(completion.tokens) == expected[index]
        ends = {instant.session: instant.at for instant in simulation.instants("finish", "target")}
        # Sessions are numbered like the prompts.
        assert finished_at == sorted(ends.values()) == [ends[index] for index in got]
        assert got != list(range(6))
        assert len(expected[got[0]]) < len(expected[got[-1]])


@sweep("max_concurrent", [1, 2, 5, 100])
def test_concurrency_is_bounded_and_results_come_in_order(max_concurrent):
    async def main(schedule: int, waits_s: float | None) -> None:
        max_running = 0

        def look(_: Any) -> None:
            nonlocal max_running
            max_running = max(max_running, simulation.runtime.num_streams)

        async with simulated(*pair(), listener=look, schedule=schedule) as simulation:
            taken = Taken(len(PROMPTS), waits_s=waits_s or 0.0)
            prompts = (iter(prompt) for prompt in PROMPTS) if waits_s is None else taken.prompts()
            many = simulation.runtime.generate_many(prompts, max_concurrent=max_concurrent, **SETTINGS)
            completions = await many
            assert await many is completions
            # Prompts that come slowly are done one by one.
            assert max_running == (1 if waits_s else min(max_concurrent, len(PROMPTS)))
            assert begun(simulation) == [tuple(prompt) for prompt in PROMPTS]
            assert texts(completions) == [continuation(prompt, 6) for prompt in PROMPTS]
            assert [completion.finish_reason for completion in completions] == ["length"] * 6
            assert simulation.runtime.statistics().generated_tokens == 36
            await assert_over(simulation)

    for schedule, waits_s in enumerate((None, 0.0, 50.0)):
        run(main, schedule, waits_s)


async def test_eight_at_a_time_unless_told_otherwise(autojump_clock):
    async with simulated(ScriptedModel(truthful)) as simulation:
        many = simulation.runtime.generate_many([[n] for n in range(20)], max_tokens=3)
        await trio.testing.wait_all_tasks_blocked()
        assert simulation.runtime.num_streams == 8
        assert len(await many) == 20


# --- async iterables ------------------------------------------------------------------------------


class Taken:
    """Prompts of an async generator, and what was done to it."""

    def __init__(self, num_prompts: int = 10**9, *, fails_at: int | None = None, waits_s: float = 0.0) -> None:
        self.num_taken = 0
        self.is_closed = False
        self._num_prompts, self._fails_at, self._waits_s = num_prompts, fails_at, waits_s

    async def prompts(self) -> AsyncIterator[Any]:
        try:
            for number in range(self._num_prompts):
                await trio.sleep(self._waits_s)
                if number == self._fails_at:
                    raise OSError("the disk is gone")
                self.num_taken += 1
                yield PROMPTS[number % len(PROMPTS)]
        finally:
            self.is_closed = True


@sweep("is_async", [True, False])
async def test_prompts_are_taken_and_generated_before_anybody_asks_but_only_so_many_ahead(is_async, autojump_clock):
    async with simulated(ScriptedModel(truthful)) as simulation:
        taken = Taken(20)
        prompts = taken.prompts() if is_async else [[n] for n in range(20)]
        async with simulation.runtime.generate_many(prompts, max_concurrent=3, max_tokens=2) as many:
            await trio.sleep(10_000)
            # Three are ready, and three wait for a place in the buffer.
            assert len(begun(simulation)) == 6
            assert simulation.runtime.num_streams == 0
            first, _ = await anext(many)
            assert first in range(3)
            await trio.sleep(10_000)
            assert len(begun(simulation)) == 7
            assert taken.num_taken == (7 if is_async else 0)
            assert not taken.is_closed
            assert sorted([first, *[index async for index, _ in many]]) == list(range(20))
        await trio.testing.wait_all_tasks_blocked()
        assert taken.is_closed == is_async
        await assert_over(simulation)


@sweep("on_error", ["raise", "return"])
async def test_an_iterable_that_raises_ends_all_with_its_error(on_error, autojump_clock):
    async with simulated(ScriptedModel(truthful)) as simulation:
        prompts = Taken(fails_at=4).prompts()
        many = simulation.runtime.generate_many(prompts, max_concurrent=1, on_error=on_error, max_tokens=2)
        assert [(await anext(many))[0] for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(OSError, match="the disk is gone"):
            await anext(many)
        await assert_over(simulation)


async def test_a_prompt_of_an_async_iterable_is_checked_when_it_is_taken(autojump_clock):
    async def prompts() -> AsyncIterator[Any]:
        yield [1]
        yield []
        yield [2]

    async with simulated(ScriptedModel(truthful)) as simulation:
        with pytest.raises(PromptError, match=r"prompts\[1\]: .*empty"):
            await simulation.runtime.generate_many(prompts(), max_concurrent=1, max_tokens=2)
        found = await simulation.runtime.generate_many(prompts(), on_error="return", max_tokens=2)
        assert [type(each) for each in found] == [Completion, PromptError, Completion]
        assert await simulation.runtime.generate_many(aiter(Taken(0).prompts())) == []


# Generators with something open around their `yield`, and how awaiting all of their prompts ends.


async def in_a_scope() -> AsyncIterator[Any]:
    with trio.fail_after(10**6):
        for prompt in PROMPTS:
            yield prompt


async def in_a_nursery() -> AsyncIterator[Any]:
    async with trio.open_nursery() as nursery:
        send, receive = trio.open_memory_channel[Any](1)

        async def fill() -> None:
            async with send:
                for prompt in PROMPTS:
                    await send.send(prompt)

        nursery.start_soon(fill)
        async for prompt in receive:
            yield prompt


async def in_a_scope_that_is_over_before_there_is_room(scope: Any = trio.move_on_after) -> AsyncIterator[Any]:
    with scope(1):
        for prompt in itertools.cycle(PROMPTS):
            yield prompt


async def in_a_nursery_that_fails() -> AsyncIterator[Any]:
    async def fail() -> None:
        await trio.sleep(1)
        raise OSError("the disk is gone")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail)
        for prompt in itertools.cycle(PROMPTS):
            yield prompt


@sweep(
    ("prompts", "ends"),
    [
        *[(in_a_scope, 6), (in_a_nursery, 6), (in_a_nursery_that_fails, ExceptionGroup)],
        (in_a_scope_that_is_over_before_there_is_room, 2),
        (partial(in_a_scope_that_is_over_before_there_is_room, trio.fail_after), trio.TooSlowError),
    ],
)
async def test_a_generator_may_have_scopes_and_nurseries_around_its_yield(prompts, ends, autojump_clock):
    async with simulated(*pair()) as simulation:
        other = simulation.runtime.stream([2, 2], **SETTINGS)
        many = simulation.runtime.generate_many(prompts(), max_concurrent=2, **SETTINGS)
        if isinstance(ends, int):
            assert texts(await many) == [continuation(prompt, 6) for prompt in PROMPTS[:ends]]
        else:
            with pytest.raises(ends):
                await many
        assert [token.id async for token in other] == continuation([2, 2], 6)
        await assert_over(simulation)


@sweep("prompts", [in_a_scope, in_a_nursery, in_a_nursery_that_fails])
async def test_a_generator_with_something_open_is_closed_when_it_is_left_early(prompts, autojump_clock):
    async with simulated(*pair()) as simulation:
        kept = prompts()
        async with simulation.runtime.generate_many(kept, max_concurrent=2, **SETTINGS):
            await trio.testing.wait_all_tasks_blocked()
        await trio.testing.wait_all_tasks_blocked()
        assert kept.ag_frame is None
        await assert_over(simulation)


# --- bad input ------------------------------------------------------------------------------------


@sweep("nth", [0, 2, 5])
@sweep("bad", [[], [64], [-1], "text", 7, None, {"role": "user"}, [1, 2, 3, 4, 5, 6, 7, 8]])
async def test_of_prompts_of_which_one_will_not_do_none_is_begun(bad, nth, autojump_clock):
    target, draft = ScriptedModel(truthful, context_length=8), ScriptedModel(truthful)
    async with simulated(target, draft) as simulation:
        prompts = [*PROMPTS[:nth], bad, *PROMPTS[nth:]]
        with pytest.raises(PromptError, match=rf"^prompts\[{nth}\]: ") as caught:
            simulation.runtime.generate_many(prompts)
        with pytest.raises(PromptError) as alone:
            simulation.runtime.stream(bad)
        assert str(caught.value) == f"prompts[{nth}]: {alone.value}"
        await trio.sleep(100)
        assert simulation.events == []


NO_LIST = r"must be a sequence of prompts.*use generate\(\)"
NO_NUMBER = "max_concurrent must be a whole number of at least 1"


@sweep(
    ("prompts", "settings", "error", "message"),
    [
        *((prompts, {}, PromptError, NO_LIST) for prompts in ("a single text", b"bytes", {"role": "user"}, 7, None)),
        *((PROMPTS, {"max_concurrent": each}, SettingsError, NO_NUMBER) for each in (0, -1, 2.0, True, None, "8")),
        (PROMPTS, {"max_tokens": 0}, SettingsError, "max_tokens"),
        (PROMPTS, {"stop_tokens": [64]}, SettingsError, "stop_tokens"),
        (PROMPTS, {"stop": "x"}, SettingsError, r"stop \['x'\] needs text.*without a tokenizer.*stop_tokens"),
        (PROMPTS, {"maxtokens": 3}, SettingsError, "maxtokens"),
    ],
)
async def test_what_will_not_do_is_refused_before_anything_begins(prompts, settings, error, message, autojump_clock):
    async with simulated(*pair()) as simulation:
        with pytest.raises(error, match=message):
            simulation.runtime.generate_many(prompts, **settings)
        await trio.sleep(100)
        assert simulation.events == []


# --- cancelling -----------------------------------------------------------------------------------


async def by_a_scope_around_await(begin: Begin, scope: trio.CancelScope, _: trio.Event) -> None:
    with scope:
        await begin()


async def by_a_scope_around_await_of_what_is_kept(
    begin: Begin, scope: trio.CancelScope, _: trio.Event
) -> Completions | None:
    many = begin()
    with scope:
        await many
    return many if scope.cancelled_caught else None


async def by_dropping_the_last_reference(begin: Begin, _: trio.CancelScope, due: trio.Event) -> None:
    many = begin()
    await due.wait()
    del many


WAYS: list[Way] = [
    *(by_a_scope_around_await, by_a_scope_around_await_of_what_is_kept, by_scope),
    *(by_break, by_leaving, by_aclose, by_dropping_the_last_reference),
]


@pytest.mark.slow
@pytest.mark.parametrize("cancel", WAYS)
def test_whenever_and_however_it_is_ended_all_of_it_ends(cancel):
    async def main(at: float, price: Any) -> None:
        async with simulated(*pair(), price=price) as simulation:
            scope, due = trio.CancelScope(), trio.Event()
            begin = partial(simulation.runtime.generate_many, PROMPTS, max_concurrent=3, **SETTINGS)

            async def end() -> None:
                await trio.sleep_until(trio.current_time() + at)
                scope.cancel()
                due.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(end)
                many = await cancel(begin, scope, due)
            gc.collect()
            back_at = trio.current_time()
            await trio.testing.wait_all_tasks_blocked()
            num_begun = len(begun(simulation))
            assert simulation.runtime.num_streams == 0
            await trio.sleep(200)
            handed = [*simulation.target_worker.handed, *(simulation.draft_worker or simulation.target_worker).handed]
            assert {job.job.kind for job in handed if job.at > back_at} <= {"close"}
            assert len(begun(simulation)) == num_begun
            if many is not None:
                for again in (anext, gathered):
                    with pytest.raises(RuntimeClosedError):
                        await again(many)
            await assert_over(simulation)

    prices = (priced(), priced(draft=8.0, verify=3.0))
    for number, at in enumerate((0.0, 1.0, 4.0, 9.25, 12.0, 20.0, 33.5, 47.0, 60.0)):
        run(main, at, prices[number % 2])


# --- failures -------------------------------------------------------------------------------------


@sweep("on_error", ["raise", "return"])
async def test_a_runtime_that_breaks_ends_all_even_where_errors_are_returned(on_error, autojump_clock):
    async with simulated(ScriptedModel(truthful, fails={"feed": range(6, 1000)})) as simulation:
        with pytest.raises(RuntimeBrokenError) as caught:
            await simulation.runtime.generate_many(PROMPTS, on_error=on_error, **SETTINGS)
        assert not hasattr(caught.value, "__notes__")


def failing_at(nth_check: int) -> ScriptedModel:
    return ScriptedModel(truthful, fails={"check": [nth_check]})


async def gathered(many: Completions) -> None:
    await many


@sweep("consume", [gathered, read])
@sweep("nth_check", [1, 4, 9])
async def test_the_first_that_fails_ends_all_with_its_error(consume, nth_check, autojump_clock):
    async with simulated(failing_at(nth_check), ScriptedModel(agreeing(0.6))) as simulation:
        many = simulation.runtime.generate_many(PROMPTS, max_concurrent=3, **SETTINGS)
        with pytest.raises(RewindError, match=f"check {nth_check} failed") as caught:
            await consume(many)
        (note,) = caught.value.__notes__
        assert note.startswith("prompts[")
        assert len(begun(simulation)) < len(PROMPTS), "others began although one had failed"
        await trio.testing.wait_all_tasks_blocked()
        for again in (anext, gathered):
            with pytest.raises(RewindError):
                await again(many)
        await assert_over(simulation)


def test_what_was_ready_before_a_failure_is_given_before_it():
    async def count() -> int:
        async with simulated(ScriptedModel(truthful)) as simulation:
            await simulation.runtime.generate([5], max_tokens=2)
            return simulation.target.num_calls["check"]

    async def main(checks: int) -> None:
        async with simulated(failing_at(2 * checks + 1)) as simulation:
            many = simulation.runtime.generate_many([[5], [6], [7]], max_concurrent=1, max_tokens=2)
            got = [(await anext(many))[0], (await anext(many))[0]]
            await trio.sleep(100)
            assert got == [0, 1]
            with pytest.raises(RewindError) as caught:
                await anext(many)
            assert caught.value.__notes__ == ["prompts[2] failed, and the generations for the others were cancelled"]

    run(main, run(count))


async def test_an_error_of_somebody_elses_code_reaches_who_waits_and_not_the_runtime(autojump_clock):
    bad_token = continuation(PROMPTS[2], 6)[3]
    async with simulated(*pair(), tokenizer=OneLetterTokenizer(fails_at=bad_token)) as simulation:
        with pytest.raises(ValueError, match=f"no token {bad_token}"):
            await simulation.runtime.generate_many(PROMPTS, **SETTINGS)
        await trio.testing.wait_all_tasks_blocked()
        assert simulation.runtime.num_streams == 0
        simulation.runtime.check_open()


@sweep("at", [0.0, 9.25, 33.5, 1000.0])
async def test_a_runtime_that_is_closed_meanwhile_ends_them_and_gives_what_was_ready(at, autojump_clock):
    ends: list[str] = []
    begun = trio.Event()

    async def wait() -> None:
        await begun.wait()
        try:
            await awaited
            ends.append("whole")
        except RuntimeClosedError:
            ends.append("closed")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        async with simulated(*pair()) as simulation:
            begin = partial(simulation.runtime.generate_many, PROMPTS, max_concurrent=2, **SETTINGS)
            awaited, kept = begin(), begin()
            begun.set()
            await trio.sleep(at)
    got: list[int] = []

    async def take() -> None:
        async for index, _ in kept:
            got.append(index)

    with pytest.raises(RuntimeClosedError, match="closed"):
        await take()
    # Of the results that nobody took, two were kept ready.
    assert len(got) == 2 if at == 1000.0 else len(got) <= 2
    assert ends == (["whole"] if at == 1000.0 else ["closed"])


# --- one reader -----------------------------------------------------------------------------------


async def test_each_is_given_once_and_to_one_task(autojump_clock):
    async with simulated(*pair()) as simulation:
        begin = partial(simulation.runtime.generate_many, PROMPTS, **SETTINGS)
        for first, second in itertools.product((gathered, read), repeat=2):
            many, refused = begin(), []

            async def try_too(many: Completions, second: Any, refused: list[StreamBusyError]) -> None:
                with pytest.raises(StreamBusyError) as caught:
                    await second(many)
                refused.append(caught.value)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(first, many)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(try_too, many, second, refused)
            assert len(refused) == 1
        many = begin()
        await anext(many)
        with pytest.raises(StreamBusyError, match="given once"):
            await many
        assert len([index async for index, _ in many]) == 5


async def test_one_that_was_closed_says_so_to_who_waits_in_another_task(autojump_clock):
    async with simulated(*pair()) as simulation:
        many = simulation.runtime.generate_many(PROMPTS, **SETTINGS)

        async def wait() -> None:
            with pytest.raises(RuntimeClosedError, match="these generations were closed"):
                await many

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(5)
            await many.aclose()
        await trio.testing.wait_all_tasks_blocked()
        await assert_over(simulation)
